"""Simulated replica: the real engine core in virtual time, and its ends of the links.

Simulated are only time, the inbox, and messages in place of bytes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from holdfast.cluster.simulate.actors.costly_message import FREE, LoopCosts
from holdfast.cluster.simulate.actors.disk import MovableRunner, Owners, SimulatedDisk
from holdfast.cluster.simulate.actors.messages import DialReplica, Retiring
from holdfast.cluster.simulate.actors.mover import SimulatedMover
from holdfast.cluster.simulate.actors.replica_link import ReplicaShape, SimulatedReplicaLink
from holdfast.cluster.simulate.actors.transfers import SimulatedTransfers
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.cluster.simulate.oracle.pseudo_model import PoisonedError
from holdfast.router.events import SendAbort, SendAhead, SendSubmit, SendTakePins
from holdfast.worker.adapter import Adapter
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.held_requests import AdapterDesk
from holdfast.worker.engine.tier_mover import TierShape
from holdfast.worker.errors import ReplicaError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.pending_tokens import with_tokens
from holdfast.worker.progress import FrozenVerdict
from holdfast.worker.scheduler.step_time import shape_of
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import Hello

MODEL: Final = "pseudo"
WATCH_S: Final = 0.2
"""Seconds between two checks of a frozen replica by its supervisor."""
RESTART_S: Final = 0.5
AHEAD_AFTER: Final = 0.25
"""The share of a step after which the next one has been planned, with two plans in flight."""


class SimulatedReplica(Process):
    """One replica, life after life."""

    def __init__(
        self,
        site: str,
        network: Network,
        shape: ReplicaShape,
        costs: LoopCosts = FREE,
        disk: SimulatedDisk | None = None,
        transfers: SimulatedTransfers | None = None,
        host: str = "host",
    ) -> None:
        """`costs` are those of the event loop of its links; `disk`: with a block store below its cache; `transfers`:
        its blocks go to other replicas.
        """
        super().__init__(site, network)
        self.host = host
        self.address = f"{host}:{site}"
        self.disk = disk
        self.transfers = transfers
        self.shape = shape
        self.costs = costs
        # Requests that wait again after a preemption come on top of those that have never run.
        self.max_num_waiting = shape.scheduler.max_num_waiting + shape.scheduler.max_num_seqs
        self.slowness = 1.0
        """Factor on the time of a step."""
        self.next_release = self.release = ""
        """Release of code and weights: that of the next life, and of this one."""
        self.num_condemned = 0
        """Times it was killed because it was frozen."""
        self.num_poisoned = 0
        """Times that a request brought it down."""
        self.busy_s = 0.0
        """Spent in steps, in all lives."""
        self.num_steps = 0
        """Steps in all lives."""
        self.num_ahead = 0
        """Steps that were planned before the step before them had its result."""
        self.num_tokens = 0
        """Drawn in all lives."""
        self._mover: SimulatedMover | None = None

    def on_start(self) -> None:
        shape = self.shape
        self.release = self.next_release
        self.core = EngineCore(shape.make_scheduler())
        self.verdict = FrozenVerdict()
        self.is_retiring = False
        self._runner = shape.make_runner(shape.num_blocks, shape.block_size, shape.num_state_slots, shape.window)
        self._links: dict[Connection, SimulatedReplicaLink] = {}
        self._num_links = 0
        self._inbox: list[Callable[[], None]] = []
        self._owners = Owners(self.release, self.core.scheduler, shape.block_size)
        if self.disk is not None or self.transfers is not None:
            self._put_below()
        if shape.max_loras:
            self._serve_adapters()
        self._in_flight: list[tuple[StepPlan, float]] = []  # plans and the times they take, the oldest first
        self._landed: tuple[StepPlan | None, StepResult | None] = (None, None)

    def _put_below(self) -> None:
        """Gives the cache a block tier; as `worker/replica/replica.py` does. What other replicas have is always asked
        for.
        """
        shape, kind, disk = self.shape, self.version_of(self.release), self.disk
        assert isinstance(self._runner, MovableRunner), "its blocks can be read and written"
        if disk is not None:
            disk.movers = [mover for mover in disk.movers if mover is not self._mover]
        self._mover = SimulatedMover(
            disk, self.transfers, kind, self._runner, self._owners, self.after, self._post, lambda: self.clock
        )
        factor = 1.0 if self.transfers is None else self.transfers.costs.computing_factor
        tier = BlockTier(
            *self.core.scheduler.caches,
            self._mover,
            TierShape(block_bytes=shape.block_size * (shape.kv_bytes_per_token or 1), state_bytes=4),
            lambda _, num_tokens: factor * (shape.step_costs.base_s + num_tokens * shape.step_costs.token_s),
            self.core.scheduler.num_awaited_blocks,
            self.core.scheduler.can_preempt,
            self.core.scheduler.pinning,
            has_store=disk is not None,
        )
        self._mover.tier = tier
        self.core.put_below(tier)
        if disk is not None:
            tier.learn(disk.names(kind), ())
        if self.transfers is not None:
            self.transfers.register(self.address, self._mover)

    def _serve_adapters(self) -> None:
        """Adapters load in a fixed time; as `AdapterAccess.serve`."""
        shape, core = self.shape, self.core

        def fetch(ticket: int, adapter: Adapter, then: Callable[[], None]) -> None:
            self.after(shape.adapter_load_s, then)

        def later(ticket: int) -> Callable[[], None]:
            return lambda: self._post(partial(core.adapter_loaded, ticket))

        slots, in_use = core.scheduler.adapter_slots, core.adapters_in_use
        take = lambda ticket, slot: None  # noqa: E731
        core.serve_adapters(AdapterDesk(shape.max_loras, slots, in_use, fetch, take, later, lambda: self.clock))

    def cost_s(self, message: Any) -> float:
        return self.costs.at_replica(message)

    # --- faults ---

    def freeze(self) -> None:
        """Stops it; its supervisor watches how long it makes no progress."""
        super().freeze()
        self.timeline.after(WATCH_S, self._watch, self.num_lives)

    def retire(self, is_retiring: bool) -> None:
        """Tells every router that it takes nothing new, or does so again; later, if it is frozen."""
        if self.is_up:
            self._do(self._say_whether_retiring, is_retiring)

    def _say_whether_retiring(self, is_retiring: bool) -> None:
        self.is_retiring = is_retiring
        for connection in self._links:
            connection.send(self, Retiring(is_retiring=is_retiring))

    def replace(self) -> None:
        """A rolling update: if it was to go, it goes, and the next one comes; later, if it is frozen."""
        if self.is_up:
            self._do(self._go)

    def _go(self) -> None:
        if self.is_retiring:
            self._restart()

    def update(self, release: str) -> None:
        """The last of a rolling update: it goes, whatever still runs there, and comes again with another release."""
        self.next_release = release
        if self.is_up:
            self._do(self._restart)

    def recover(self) -> None:
        """Sets the speed back to normal."""
        self.slowness = 1.0

    def _restart(self) -> None:
        self.kill()
        self.timeline.after(RESTART_S, self.revive)

    def _watch(self, life: int) -> None:
        if not self.is_frozen or life != self.num_lives:
            return
        has_work = self.has_backlog or self.core.scheduler.has_work
        if self.verdict.look(self.num_steps, has_work=has_work, expected_gap_s=0.0, now=self.timeline.now):
            self.num_condemned += 1
            self._restart()
        else:
            self.timeline.after(WATCH_S, self._watch, life)

    # --- messages: as in `worker/replica/link_server.py`, all but the greeting goes through the engine's inbox ---

    def on_message(self, connection: Connection, message: Any) -> None:
        """Acts on a router's message."""
        match message:
            case DialReplica():
                self._greet(connection)
            case SendSubmit():
                link = self._links[connection]
                attempt, request = link.take_in(message)
                self._post(lambda: self.core.submit(request, link, self.clock, attempt))
            case SendTakePins():
                self._take_pins(message.address)
            case SendAhead():
                link = self._links[connection]
                ahead = message.request, self.clock, link, link.key(message.attempt)
                self._post(partial(self.core.fetch_ahead, *ahead))
            case SendAbort():
                self._post(partial(self.core.abort, self._links[connection].key(message.attempt)))

    def unpin(self, tenant: str) -> None:
        """An operator ends the pins of a tenant."""
        self._post(partial(self._unpin_all, tenant))

    def _unpin_all(self, tenant: str) -> None:
        self.core.scheduler.pinning.unpin_all(tenant)

    def unpin_one(self) -> None:
        """An operator ends one pin, the one that lasts longest."""
        self._post(self._unpin_one)

    def _unpin_one(self) -> None:
        pinning = self.core.scheduler.pinning
        held = max(pinning.held(self.clock), key=lambda one: (one.ttl_s, one.hashes), default=None)
        if held is not None:
            pinning.unpin(held.tenant, held.hashes[-1])

    def _take_pins(self, address: str) -> None:
        """Does as `worker/replica/block_exchange.py`."""
        if self._mover is not None and self.transfers is not None:
            self.transfers.ask_for_pins(self._mover, address)

    def on_closed(self, connection: Connection) -> None:
        self._post(partial(self.core.detach, self._links.pop(connection)))

    def _greet(self, connection: Connection) -> None:
        self._num_links += 1
        link = self._links[connection] = SimulatedReplicaLink(f"link-{self._num_links}", self, connection, self.costs)
        connection.send(self, Hello(facts=self._facts(), load=self.core.load))
        if self.is_retiring:
            connection.send(self, Retiring(is_retiring=True))
        self._post(partial(self.core.attach, link))
        if self.shape.prefix_caching:
            self._post(partial(self.core.follow_cache, link))

    # --- the turn of `worker/engine/engine.py`, in virtual time ---

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        if not self._in_flight:
            self._turn()

    def _turn(self) -> None:
        self._take_commands()
        if self.core.tier is not None and not self.core.scheduler.has_work:
            self.core.tend_tier(self.clock)
        plan = self.core.scheduler.plan(self.clock, self._max_steps)
        if plan is None:
            self._deliver()
            if self.core.tier is not None and self.core.tier.restores.next_due_s < math.inf:
                wait_s = self.core.most_idle_s(self.clock, math.inf)
                self.after(wait_s, self._post, _nothing)
            return
        self._launch(plan)
        self._begin_step()

    @property
    def _max_steps(self) -> int:
        """Steps of a plan. Several, though the steps take longer than those that a real engine would run on one plan:
        arrivals wait meanwhile, which must have no other effect.
        """
        scheduler = self.shape.scheduler
        return 1 if scheduler.async_scheduling else scheduler.num_scheduler_steps

    def _take_commands(self) -> None:
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()

    def _launch(self, plan: StepPlan) -> None:
        if self.core.suspects.has_news:
            self._deliver()
        step_s = self.shape.step_costs.predict(shape_of(plan)) * self.slowness
        self._in_flight.append((plan, step_s * plan.num_steps))

    def _begin_step(self) -> None:
        """The device goes on with the oldest plan. With two plans in flight, the host makes the next one meanwhile."""
        _, step_s = self._in_flight[0]
        self.busy_s += step_s
        self.after(step_s, self._finish_step)
        if self.shape.scheduler.async_scheduling:
            self.after(AHEAD_AFTER * step_s, self._plan_ahead)

    def _plan_ahead(self) -> None:
        self._take_commands()
        plan = self.core.scheduler.plan_ahead(self.clock)
        if plan is not None:
            self.num_ahead += 1
            self._launch(plan)

    def _finish_step(self) -> None:
        plan, step_s = self._in_flight[0]
        try:
            self._owners.check(plan)
            result = self._runner.run(with_tokens(plan, *self._landed))
        except PoisonedError as error:
            self.num_poisoned += 1
            for listener in self.core.listeners:
                listener.on_failure(ReplicaError(f"the replica failed: {error}"))
            self._restart()
            return
        del self._in_flight[0]
        self._landed = (plan, result)
        self.num_tokens += self.core.commit(plan, result, step_s)
        self.num_steps += 1
        self._deliver()
        if self.core.tier is not None:
            self.core.tend_tier(self.clock, step_s)
        if self._in_flight:
            self._begin_step()
        else:
            self._turn()

    def _deliver(self) -> None:
        for listener, update in self.core.take_updates():
            listener.on_update(update)

    # --- what can be asked ---

    @property
    def num_unanswered(self) -> int:
        """Attempts of connected routers that have had no final answer."""
        return sum(link.num_unanswered for link in self._links.values())

    def check_integrity(self) -> None:
        """Asserts that scheduler, blocks and links agree."""
        self.core.check_integrity()
        self._owners.check_pins()
        if not self._inbox:
            assert self.core.listeners == list(self._links.values()), "the engine and the links differ"

    def version_of(self, release: str) -> str:
        """The version of its lives with this release."""
        return replace(self._facts(), release=release).version

    def _facts(self) -> ReplicaFacts:
        return ReplicaFacts(
            replica_id=f"{self.site}.{self.num_lives}",
            model=MODEL,
            path="",
            model_type=MODEL,
            release=self.release,
            dtype="",
            kv_bytes_per_token=self.shape.kv_bytes_per_token,
            eos_token_ids=frozenset(),
            max_model_len=self.shape.max_model_len,
            vocab_size=self.shape.vocab_size,
            tensor_parallel_size=1,
            block_size=self.shape.block_size,
            num_blocks=self.shape.num_blocks,
            state_blocks=self.shape.state_blocks,
            row_invariant=True,
            transfers_blocks=self.transfers is not None,
            address=self.address,
        )


def _nothing() -> None:
    """A command that only wakes the engine."""
