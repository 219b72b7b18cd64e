"""Simulated mover of blocks: between the caches of a replica, the disk of its host, and other replicas."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.cluster.simulate.actors.disk import NOBODY, MovableRunner, MovingFigures, Owners, Row, SimulatedDisk
from holdfast.cluster.simulate.actors.transfers import Incoming, SimulatedTransfers
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.tier_mover import KV, Place
from holdfast.worker.request import BlockSource, PinnedPrefix
from holdfast.worker.step_plan import StateCopy


class SimulatedMover:
    """Mover of one life of a replica."""

    has_room = True

    def __init__(
        self,
        disk: SimulatedDisk | None,
        transfers: SimulatedTransfers | None,
        kind: str,
        runner: MovableRunner,
        owners: Owners,
        after: Callable[..., None],
        post: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`after` calls later, `post` between two steps; neither once the replica has died."""
        self.counts = MovingFigures() if transfers is None else replace(transfers.costs.figures)
        self.tier: BlockTier | None = None
        self.kind = kind
        self.now = now
        self._disk = disk
        self._transfers = transfers
        self._runner = runner
        self._owners = owners
        self._after = after
        self._post = post
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Incoming] = {}
        if disk is not None:
            disk.movers.append(self)

    # --- the disk ---

    def store(self, places: Sequence[Place]) -> None:
        self._after(0.003 * self._slowness, self._put, self._rows(places))

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        assert self._disk is not None, "there is something to store to"
        self._disk.keep(self.kind, names, tenant, ttl_s)

    def _put(self, rows: list[tuple[bytes, Row]]) -> None:
        assert self._disk is not None, "there is something to store to"
        evicted: list[tuple[str, bytes]] = []
        for name, row in rows:
            evicted += self._disk.put(self.kind, name, row)
        gone = set(evicted)
        for mover in self._disk.movers:
            mover._hear(self.kind, [name for name, _ in rows if (self.kind, name) not in gone], evicted)

    def _hear(self, kind: str, names: list[bytes], evicted: Sequence[tuple[str, bytes]]) -> None:
        came = names if kind == self.kind else []
        gone = [name for of, name in evicted if of == self.kind]
        if came or gone:
            self._after(0.001, self._post, lambda: self.tier.learn(came, gone) if self.tier else None)

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        if not names:
            incoming = self._incoming.pop(ticket, None)
            if incoming is not None:
                incoming.is_over = True
            return
        for number in range(-(-len(names) // piece)):
            delay_s = 0.002 * (number + 1) * self._slowness
            self._after(delay_s, self._post, lambda: self.tier.restores.note_piece(ticket) if self.tier else None)

    @property
    def _slowness(self) -> float:
        return 1.0 if self._disk is None else self._disk.slowness

    # --- other replicas ---

    @property
    def can_ask(self) -> bool:
        return self._transfers is not None

    def ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        assert self._transfers is not None, "others can be asked"
        self._incoming[ticket] = self._transfers.ask(self, ticket, source, names, piece)

    def post(self, command: Callable[[], None]) -> None:
        self._after(0.0, self._post, command)

    def begin_sending(self, names: Sequence[bytes], source: BlockSource, incoming: Incoming) -> None:
        """Does as `worker/replica/block_exchange.py`."""
        assert self.tier is not None, "it was looked at"
        sendings, waits = self.tier.sendings, source.is_computing
        blocks = [name for name in names if name.startswith(KV)]
        found = blocks if waits else sendings.found(blocks)
        if not sendings.has_room or not found:
            incoming.cut()
            return
        incoming.settle(found, sum(name.startswith(KV) for name in found))
        self._outgoing[sendings.begin(found, self.now(), 1.0, waits=waits)] = incoming

    def pins(self) -> list[PinnedPrefix]:
        """Prefixes pinned now."""
        return self._owners.pinned(self.now())

    def send(self, number: int, places: Sequence[Place]) -> None:
        incoming = self._outgoing[number]
        if places:
            assert self._transfers is not None, "somebody has asked"
            self._transfers.deliver(incoming, self._rows(places))
            return
        del self._outgoing[number]
        self._after(max(0.0, incoming.free_s - self.now()), incoming.cut)

    def sends_room(self, number: int) -> bool | None:
        incoming = self._outgoing[number]
        if incoming.is_over:
            return None
        return incoming.free_s < self.now() + 0.05

    # --- both ---

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        self._runner.copy_states(state_copies)
        incoming = self._incoming.get(ticket)
        rows: dict[bytes, Row | None] = {}
        if incoming is not None:
            rows |= incoming.ready.popleft()
        elif self._disk is not None:
            rows = {name: self._disk.get(self.kind, name) for name, _ in places}
        for name, place in places:
            if (row := rows.get(name)) is not None:
                self._runner.write_block(name[:1], place, row.content)
                if name[:1] == KV:
                    self._owners[place] = row.owner
        return [rows.get(name) is not None for name, _ in places]

    def _rows(self, places: Sequence[Place]) -> list[tuple[bytes, Row]]:
        return [
            (name, Row(self._runner.read_block(name[:1], place), self._owners[place] if name[:1] == KV else NOBODY))
            for name, place in places
        ]
