"""Rank orders: what the leader has the other ranks do besides steps. To stop, to take other weights, and to copy blocks
to their stores and from them.

    block order:  [kind, ticket, blocks of a piece, C, N | C sources | C destinations | N places | N names of 3 words]

Each is one int64 array. A block order is sent between two steps, so a rank's caches are what they are on the leader
when it is carried out. A rank stores its own share of a block, and a block is there only if all shares are.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import torch

from holdfast.worker.cache.block_store import BlockStore
from holdfast.worker.cache.sealing import sealer_of
from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.engine.block_mover import BlockMover, MoverCounts, MoverEvents
from holdfast.worker.engine.tier_mover import KV, STATE, Place
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.block_bytes import BlockMemory
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.models.weight_files import weights_stamp
from holdfast.worker.models.weights import model_folder
from holdfast.worker.step_plan import StateCopy

_HEADER: Final = 5
_NAME_WORDS: Final = 3
_NAME_BYTES: Final = 17


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


BLOCK_ORDERS: Final = (Order.STORE, Order.FETCH, Order.TAKE)
ADAPTER_ORDERS: Final = (Order.FETCH_ADAPTER, Order.TAKE_ADAPTER)


class RankMover:
    """One rank's part of the orders."""

    def __init__(self, mover: BlockMover, memory: BlockMemory, group: TensorParallelGroup) -> None:
        self.mover = mover
        self._events: MoverEvents | None = None
        self._memory = memory
        self._group = group

    @classmethod
    def of(
        cls, config: WorkerConfig, info: ModelInfo, memory: BlockMemory | None, group: TensorParallelGroup
    ) -> "RankMover | None":
        """The mover that the settings ask for. Raises `ConfigurationError` where there can be none."""
        wanted = config.cache.offload_folder_and_bytes
        if wanted is None:
            return None
        _check(config, memory)
        assert memory is not None, "it was checked"
        folder, num_bytes = wanted
        kind = repr(
            (
                *(info.model_type, info.release, info.numerics, info.quantization, info.block_size),
                *(group.size, group.rank, memory.form, weights_stamp(model_folder(config.model))),
            )
        )
        store = BlockStore(Path(folder), num_bytes, kind.encode(), sealer_of(config.cache.kv_offload_key_file))
        pools = {KV: memory.blocks} if memory.states is None else {KV: memory.blocks, STATE: memory.states}
        return cls(BlockMover(store, pools), memory, group)

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
        kind, ticket, piece, num_copies, num_names = order[:_HEADER].tolist()
        copies, places, words = np.split(order[_HEADER:], [2 * num_copies, 2 * num_copies + num_names])
        names = [row[:_NAME_BYTES].tobytes() for row in words.view(np.uint8).reshape(num_names, 8 * _NAME_WORDS)]
        if kind == Order.STORE:
            self.mover.store(list(zip(names, places.tolist(), strict=True)))
        elif kind == Order.FETCH:
            self.mover.fetch(ticket, names, piece)
        else:
            if self._memory.copy_states is not None:
                self._memory.copy_states(copies.reshape(2, num_copies))
            found = self.mover.take(ticket, list(zip(names, places.tolist(), strict=True)))
            everywhere = self._group.all_gather(torch.tensor([found], dtype=torch.uint8), dim=0)
            return [bool(one) for one in everywhere.min(dim=0).values.tolist()]
        return ()


class RankMovers:
    """The tier's mover on the leader: gives the orders, and carries out its own part."""

    def __init__(self, own: Callable[[], RankMover | None], group: TensorParallelGroup) -> None:
        """`own`: the leader's mover, another one once other weights are served."""
        self._own = own
        self._group = group

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

    def store(self, places: Sequence[Place]) -> None:
        self._order(Order.STORE, places=places)

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self._order(Order.FETCH, ticket, piece, [(name, 0) for name in names])

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        return self._order(Order.TAKE, ticket, 0, places, state_copies)

    def _order(
        self,
        kind: Order,
        ticket: int = 0,
        piece: int = 0,
        places: Sequence[Place] = (),
        copies: Sequence[StateCopy] = (),
    ) -> Sequence[bool]:
        header = np.array([kind, ticket, piece, len(copies), len(places)], dtype=np.int64)
        moved = np.array(copies, dtype=np.int64).reshape(-1, 2).T.ravel()
        names = b"".join(name.ljust(8 * _NAME_WORDS, b"\0") for name, _ in places)
        where = np.array([place for _, place in places], dtype=np.int64)
        order = np.concatenate((header, moved, where, np.frombuffer(names, dtype=np.int64)))
        if self._group.size > 1:
            self._group.broadcast(order)
        return self.own.carry_out(order)


def _check(config: WorkerConfig, memory: BlockMemory | None) -> None:
    setting = "cache.kv_offload_disk"
    if memory is None:
        raise ConfigurationError(f"{setting}: only the native executor on CPUs can keep blocks on a disk")
    if config.model.load_format == "dummy":
        raise ConfigurationError(f"{setting}: random weights (load_format = 'dummy') have no name to keep blocks by")
    if config.speculation.speculative in ("draft", "mtp"):
        raise ConfigurationError(f"{setting}: what a draft model caches is not kept; choose ngram or suffix")
