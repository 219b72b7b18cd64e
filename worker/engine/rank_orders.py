"""Rank orders: the leader's commands to the other ranks besides steps: stop, load new weights, and copy blocks to and
from stores and other replicas.

    block order:  [kind, ticket, blocks of a piece, C, N, T | C sources | C destinations | N places | N names of 3 words
                   | T bytes of text]

Each is one int64 array. A block order is sent between two steps, so a rank's caches then equal the leader's. A rank
stores, sends and receives its own share of a block, and a block is there only if all shares are. Of a transfer that
comes, a place is `_OWN` for the name of a block here, and `_SENT` for the name of one that is sent.
"""

import ipaddress
import json
import logging
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import torch

from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.cache.memory_store import MemoryStore
from holdfast.worker.cache.sealing import sealer_of
from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.engine.nixl_way import Nixl
from holdfast.worker.engine.offload_checks import check_offload
from holdfast.worker.engine.restore import Expected
from holdfast.worker.engine.staging import SharedMemory, Way
from holdfast.worker.engine.tier_mover import KV, NAME_BYTES, STATE, MoverCounts, MoverEvents, Place, Store
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.engine.transfer_shares import RankShare, SendingReplica, read_heads
from holdfast.worker.executors.block_layout import Heads
from holdfast.worker.executors.kv_cache import BlockMemory
from holdfast.worker.executors.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.models.weight_files import weights_stamp
from holdfast.worker.models.weights import model_folder
from holdfast.worker.request import BlockSource
from holdfast.worker.step_plan import StateCopy

logger = logging.getLogger(__name__)

_HEADER: Final = 6  # numbers: kind, ticket, piece, counts of copies, names, text
_NAME_WORDS: Final = 3
_OWN, _SENT = 0, 1  # names of blocks here, and of blocks that are sent


class Order(IntEnum):
    """First word of a message."""

    KEEP_ALIVE = 0
    STOP = -1
    RELOAD = -2
    """A folder's name and a version follow."""
    STORE = -3
    """Blocks to copy to the store below the cache follow, each with its place."""
    FETCH = -4
    """A ticket, the blocks of a piece and the names of blocks to read from the store follow."""
    TAKE = -5
    """A ticket, copies of slots, and the places of its next piece follow."""
    FETCH_ADAPTER = -6
    """A ticket and an adapter to load follow."""
    TAKE_ADAPTER = -7
    """A ticket and the slot to put it in follow."""
    LISTEN = -8
    """The host at which to listen for other replicas follows."""
    OFFER = -9
    """A transfer to another replica begins: its number, its key and the heads of the other's ranks follow."""
    SEND = -10
    """Blocks of a transfer to copy and send follow, each with its place; none: it ends."""
    RECEIVE = -11
    """Like `FETCH`, from another replica: what it is and the transfer's key follow."""
    KEEP = -12
    """Names to keep in the store follow, with milliseconds in place of a piece, and their tenant."""


def number_message(number: int) -> Message:
    """A message of one number."""
    return np.array([number], dtype=np.int64)


def reload_message(folder: str, version: str) -> Message:
    """The order to take the weights of a folder as a version."""
    return np.array([Order.RELOAD, *f"{folder}\0{version}".encode()], dtype=np.int64)


def read_reload(message: Message) -> tuple[str, str]:
    """The folder and the version of an order to reload."""
    folder, version = bytes(message[1:].tolist()).decode().split("\0")
    return folder, version


BLOCK_ORDERS: Final = (
    *(Order.STORE, Order.FETCH, Order.TAKE),
    *(Order.LISTEN, Order.OFFER, Order.SEND, Order.RECEIVE, Order.KEEP),
)
ADAPTER_ORDERS: Final = (Order.FETCH_ADAPTER, Order.TAKE_ADAPTER)


class RankMover:
    """One rank's part of the orders."""

    def __init__(self, mover: BlockMover, memory: BlockMemory, group: TensorParallelGroup) -> None:
        """All ranks call this together."""
        self.mover = mover
        self._share = RankShare.of(memory, group)
        self.addresses: list[tuple[str, int]] = []
        """Addresses of all ranks at which blocks can be had, once they listen. Port 0: it cannot listen."""
        self._events: MoverEvents | None = None
        self._memory = memory
        self._group = group

    @classmethod
    def of(
        cls, config: WorkerConfig, info: ModelInfo, memory: BlockMemory | None, group: TensorParallelGroup
    ) -> "RankMover | None":
        """Makes the block mover of the settings. Raises `ConfigurationError` if this model or machine has none."""
        check_offload(config, memory, group.size)
        store = _store(config, info, memory, group)
        is_on_device = memory is not None and memory.is_on_device
        if memory is None or (store is None and (is_on_device or not can_transfer(config, info))):
            return None
        pools = {KV: memory.blocks} if memory.states is None else {KV: memory.blocks, STATE: memory.states}
        return cls(BlockMover(store, pools, _way(config, info)), memory, group)

    @property
    def has_store(self) -> bool:
        """Whether there is a store below the cache."""
        return self.mover.has_store

    @property
    def share(self) -> RankShare:
        """This rank's part in transfers."""
        assert self._share is not None, "blocks can be transferred"
        return self._share

    @property
    def has_states(self) -> bool:
        """Whether states go with blocks."""
        return self._memory.states is not None

    def start(self, events: MoverEvents | None = None) -> None:
        """Begins to move blocks; `events` are the leader's."""
        self._events = events
        self.mover.start(events)

    def hand_over_to(self, other: "RankMover") -> None:
        """Closes this mover and starts the one of other weights, whose blocks are stored apart."""
        self.close()
        if other._group.rank == 0:
            other.start(self._events)

    def close(self) -> None:
        self.mover.close()

    def carry_out(self, order: Message) -> Sequence[bool]:
        """Carries out the leader's order. For a piece that was taken: for each of its blocks, whether all ranks have
        it.
        """
        kind, ticket, piece, num_copies, num_names, num_text = order[:_HEADER].tolist()
        ends = np.cumsum([2 * num_copies, num_names, _NAME_WORDS * num_names])
        copies, places, words, text = np.split(order[_HEADER:], ends)
        names = [row[:NAME_BYTES].tobytes() for row in words.view(np.uint8).reshape(num_names, 8 * _NAME_WORDS)]
        where = list(zip(names, places.tolist(), strict=True))
        match kind:
            case Order.STORE:
                self.mover.store(where)
            case Order.FETCH:
                self.mover.fetch(ticket, names, piece)
            case Order.SEND:
                self.mover.outgoing.send(ticket, where)
            case Order.TAKE:
                if self._memory.copy_states is not None:
                    self._memory.copy_states(copies.reshape(2, num_copies))
                found = torch.tensor([self.mover.take(ticket, where)], dtype=torch.uint8)
                everywhere = self._group.all_gather(found, dim=0)
                return [bool(one) for one in everywhere.min(dim=0).values.tolist()]
            case _:
                said = text.view(np.uint8)[:num_text].tobytes().decode(errors="surrogatepass")
                self._meet(Order(kind), ticket, where, piece, said)
        return ()

    def _meet(self, kind: Order, ticket: int, where: Sequence[Place], piece: int, text: str) -> None:
        """Carries out an order that concerns another replica, or a tenant."""
        if kind is Order.KEEP:
            self.mover.keep([name for name, _ in where], text, piece / 1e3)
            return
        if kind is Order.LISTEN:
            self._listen(text)
            return
        parts = json.loads(text)
        key = TransferKey(bytes.fromhex(parts["transfer"]), bytes.fromhex(parts["key"]), parts["is_encrypted"])
        heads = read_heads(parts["heads"])
        if kind is Order.OFFER:
            self.mover.outgoing.offer(ticket, self.share.takers(key, heads))
            return
        addresses = [(host, port) for host, port in parts["addresses"]]
        there = SendingReplica(addresses, heads, parts["block_size"], parts["is_computing"])
        names, sent = ([name for name, place in where if place == one] for one in (_OWN, _SENT))
        expected = Expected(names, sent, parts["num_skipped"])
        self.mover.receive(ticket, self.share.transfer(key, there, expected), piece)

    def _listen(self, host: str) -> None:
        """Listens on a port, and gathers the addresses of all ranks. A rank on another host than the leader does so
        where it reaches the leader.
        """
        own = self._group.own_host or host
        if ipaddress.ip_address(own).is_loopback:
            own = host
        port = 0
        try:
            port = self.mover.outgoing.listen(own)
        except OSError as error:
            logger.warning("blocks cannot be sent to other replicas: %s: %s", own, error)
        packed = int(ipaddress.ip_address(own)).to_bytes(16, "big") + port.to_bytes(2, "big")
        everywhere = self._group.all_gather(torch.frombuffer(bytearray(packed), dtype=torch.uint8)[None], dim=0)
        self.addresses = [_address(bytes(row)) for row in everywhere.tolist()]


class RankMovers:
    """The tier's mover on the leader: gives the orders, and carries out its own part."""

    def __init__(self, own: Callable[[], RankMover | None], group: TensorParallelGroup) -> None:
        """`own`: the leader's mover, another one once other weights are served."""
        self._own = own
        self._group = group
        self.asker: Callable[[int, BlockSource, Sequence[bytes], int, float], None] | None = None
        """Asks another replica to send blocks: a ticket, the replica, their names, the blocks of a piece, and a timeout
        in seconds. None: no other replica can be reached.
        """

    @property
    def own(self) -> RankMover:
        """The leader's part."""
        mover = self._own()
        assert mover is not None, "the settings ask for a store"
        return mover

    @property
    def counts(self) -> MoverCounts:
        """Cost of moving, and content of the store."""
        return self.own.mover.counts

    @property
    def has_room(self) -> bool:
        return self.own.mover.has_room

    def close(self) -> None:
        """Ends the leader's mover, which writes what is staged. The other ranks' end with their processes' work."""
        self.own.close()

    def store(self, places: Sequence[Place]) -> None:
        self._order(Order.STORE, places=places)

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        self._order(Order.KEEP, 0, round(1e3 * ttl_s), [(name, 0) for name in names], text=tenant)

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self._order(Order.FETCH, ticket, piece, [(name, 0) for name in names])

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        return self._order(Order.TAKE, ticket, 0, places, state_copies)

    # --- other replicas ---

    def listen(self, host: str) -> list[tuple[str, int]]:
        """Addresses of all ranks for other replicas; they listen from now on. Empty where one of them cannot."""
        own = self.own
        if not own.addresses:
            self._order(Order.LISTEN, text=host)
        return own.addresses if all(port for _, port in own.addresses) else []

    def ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        if self.asker is not None:
            self.asker(ticket, source, names, piece, lasts_s)

    @property
    def can_ask(self) -> bool:
        return self.asker is not None

    def offer(self, number: int, key: TransferKey, heads: Sequence[Heads]) -> None:
        """Opens a transfer on all ranks, to ranks with these heads."""
        self._order(Order.OFFER, number, text=_key_text(key, heads=heads))

    def send(self, number: int, places: Sequence[Place]) -> None:
        self._order(Order.SEND, number, places=places)

    def sends_room(self, number: int) -> bool | None:
        return self.own.mover.outgoing.has_room(number)

    def receive(self, ticket: int, there: SendingReplica, key: TransferKey, expected: Expected, piece: int) -> None:
        """Begins to receive blocks of a transfer on all ranks, `piece` of their own at a time."""
        places = [*((name, _OWN) for name in expected.names), *((name, _SENT) for name in expected.sent)]
        text = _key_text(key, num_skipped=expected.num_skipped, **there._asdict())
        self._order(Order.RECEIVE, ticket, piece, places, text=text)

    def _order(
        self,
        kind: Order,
        ticket: int = 0,
        piece: int = 0,
        places: Sequence[Place] = (),
        copies: Sequence[StateCopy] = (),
        text: str = "",
    ) -> Sequence[bool]:
        given = text.encode(errors="surrogatepass")
        header = np.array([kind, ticket, piece, len(copies), len(places), len(given)], dtype=np.int64)
        moved = np.array(copies, dtype=np.int64).reshape(-1, 2).T.ravel()
        names = b"".join(name.ljust(8 * _NAME_WORDS, b"\0") for name, _ in places)
        where = np.array([place for _, place in places], dtype=np.int64)
        padded = given.ljust(-(-len(given) // 8) * 8, b"\0")
        rest = np.frombuffer(names + padded, dtype=np.int64)
        order = np.concatenate((header, moved, where, rest))
        if self._group.size > 1:
            self._group.broadcast(order)
        return self.own.carry_out(order)


def can_transfer(config: WorkerConfig, info: ModelInfo) -> bool:
    """Whether blocks of this replica may go to others, and theirs come here."""
    has_draft = config.speculation.speculative in ("draft", "mtp")  # whose blocks would be missing
    is_cached = config.cache.enable_prefix_caching and not info.computes_whole_prompts
    return config.cache.kv_transfer and is_cached and info.window is None and not has_draft


def _key_text(key: TransferKey, **others: object) -> str:
    parts = {"transfer": key.transfer.hex(), "key": key.key.hex(), "is_encrypted": key.is_encrypted}
    return json.dumps({**parts, **others})


def _address(packed: bytes) -> tuple[str, int]:
    number = int.from_bytes(packed[:16], "big")
    host = ipaddress.ip_address(number) if number >> 32 else ipaddress.IPv4Address(number)
    return str(host), int.from_bytes(packed[16:], "big")


def _way(config: WorkerConfig, info: ModelInfo) -> Way | None:
    """Way of blocks between this rank and others besides connections. Raises `ConfigurationError`."""
    way = config.cache.kv_transfer_way
    if way == "tcp" or not can_transfer(config, info):
        return None
    return SharedMemory() if way == "auto" else Nixl()


def _store(
    config: WorkerConfig, info: ModelInfo, memory: BlockMemory | None, group: TensorParallelGroup
) -> Store | None:
    """The store below the cache that the settings ask for."""
    cache, share = config.cache, config.scheduler.pinned_share
    if cache.kv_offload_memory is not None:
        return MemoryStore(cache.kv_offload_memory, clock=time.monotonic, kept_share=share)
    if (wanted := cache.offload_folder_and_bytes) is None or memory is None:
        return None
    folder, num_bytes = wanted
    kind = info.block_kind(memory.form, group.size, group.rank, weights_stamp(model_folder(config.model)))
    sealer = sealer_of(cache.kv_offload_key_file)
    return BlockStore(Path(folder), num_bytes, kind, sealer, clock=time.time, kept_share=share)
