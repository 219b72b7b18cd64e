"""Incoming blocks: a transfer on its way into one rank, from one rank of another replica or from several, which have a
part of its heads each.

Blocks that are cut otherwise there, over ranks or over tokens, are regrouped (`worker/executors/block_layout.py`) once
all senders' parts of them are there. A sender that is ahead of the others by more than it may stage ends the transfer
itself (`MAX_STAGED_BYTES` of `outgoing_blocks.py`), so what waits here is bounded.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.frame_receiver import FrameMemory
from holdfast.worker.engine.staging import Way
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.executors.block_layout import Regrouping


class Sender(NamedTuple):
    """Rank of another replica that sends blocks."""

    address: tuple[str, int]
    key: TransferKey


class Taker(NamedTuple):
    """Rank of another replica that blocks are sent to."""

    key: TransferKey
    cut: Callable[[Block], Block] | None = None
    """The part of a block that it takes; None: all of it."""


class Transfer(NamedTuple):
    """Blocks that another replica sends to one rank."""

    senders: Sequence[Sender]
    sent: Sequence[bytes]
    """Names of the blocks that each of them sends, in order."""
    names: Sequence[bytes]
    """Names of the rank's blocks that are made of them, in order."""
    regrouping: Regrouping | None = None
    """Makes them; None: they are those that are sent."""
    is_computing: bool = False
    """Whether the other replica computes them now: the speed is that of computing."""


class IncomingBlocks:
    """Receives a transfer, on a thread for each sender."""

    def __init__(
        self,
        transfer: Transfer,
        on_blocks: Callable[[Sequence[Block]], bool],
        on_end: Callable[[Exception | None], None],
        way: Way | None = None,
        memory: FrameMemory | None = None,
    ) -> None:
        """`on_blocks` takes the rank's blocks, correct and in order, from one thread at a time; it returns whether more
        are wanted, and may wait. `on_end` is called once: with the first thing that went wrong, or None. `way`: how the
        senders' memory may be read. `memory`: that of earlier transfers' frames.
        """
        self._transfer = transfer
        self._on_blocks = on_blocks
        self._on_end = on_end
        self._made = iter(transfer.names)
        self._lock = threading.Lock()
        self._num_open = len(transfer.senders)
        self._receivers = [
            BlockReceiver(sender.address, sender.key, transfer.sent, self._taker(part), self._note_end, way, memory)
            for part, sender in enumerate(transfer.senders)
        ]

    def start(self) -> None:
        """Connects to all senders."""
        for receiver in self._receivers:
            receiver.start()

    def close(self) -> None:
        """Nothing more is wanted."""
        for receiver in self._receivers:
            receiver.close()

    def _taker(self, part: int) -> Callable[[Sequence[Block]], bool]:
        regrouping = self._transfer.regrouping
        if regrouping is None:
            return self._on_blocks

        def take(blocks: Sequence[Block]) -> bool:
            with self._lock:
                rows = regrouping.take(part, [row for _, row in blocks])
                made = [(name, row) for row, name in zip(rows, self._made, strict=False)]
                return not made or self._on_blocks(made)

        return take

    def _note_end(self, error: Exception | None) -> None:
        """One connection is closed. After an error nothing complete comes, so the others are closed too."""
        with self._lock:
            self._num_open -= 1
            is_over = self._num_open == 0 if error is None else self._num_open >= 0
            if error is not None:
                self._num_open = -1
        if error is not None and is_over:
            self.close()
        if is_over:
            self._on_end(error)
