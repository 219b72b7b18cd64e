"""Sums over ranks: shared memory of the ranks of one host, in which the native executor exchanges partial sums, and the
segments of a step that end in a sum where there is none.

Rank 0 makes a nameless file in memory, and the others open it through its process's folder in /proc. So nothing has to
be cleaned up after any end of a process, and no limit of /dev/shm applies.
"""

import ctypes
import logging
import mmap
import os
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.model_structures import NativeExchange, NativeModel
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.state_layers import Mamba2
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

_NO_FILE: Final = -1  # the leader could not make shared memory
_TOKEN_BYTES: Final = 16
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")

_LOSSES: Final = {1: "has ended", 2: "is silent", 3: "has left"}
"""Words for the loss of a rank, by the hundreds of an outcome below zero; the rest of it is the rank
(`native/exchange.h`)."""


class Exchange:
    """One rank's hold on the memory. `native` is passed to a decoder, which ends before this is closed."""

    def __init__(self, memory: mmap.mmap, processes: list[int], group: TensorParallelGroup) -> None:
        """`processes` has a pidfd of each rank."""
        self._memory = memory
        self._processes = (ctypes.c_int * len(processes))(*processes)
        self._start: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        self.native = NativeExchange(
            memory=ctypes.addressof(self._start),
            processes=self._processes,
            timeout_s=group.data_timeout_s,
            rank=group.rank,
            ranks=group.size,
        )

    def close(self) -> None:
        """Closing again does nothing."""
        if self._start is not None:
            self._start = None
            self._memory.close()
            for process in self._processes:
                os.close(process)


def meet(group: TensorParallelGroup, model: NativeModel, library: ctypes.CDLL) -> Exchange | None:
    """Shares memory with the other ranks, for a model's steps; None where that cannot be had, or there are none."""
    num_bytes = library.native_exchange_bytes(group.size, model.max_rows, model.hidden, model.sum_parts)
    exchange = attach(group, num_bytes) if group.size > 1 and num_bytes > 0 else None
    model.exchange = None if exchange is None else ctypes.pointer(exchange.native)
    return exchange


def check_step(outcome: int) -> None:
    """Raises `ReplicaError` for a step that has failed, and names the rank that was lost."""
    kind, rank = divmod(-outcome, 100)
    if kind in _LOSSES:
        raise ReplicaError(f"a rank of the replica was lost: rank {rank} {_LOSSES[kind]}")
    check_outcome(outcome, "a step")


def attach(group: TensorParallelGroup, num_bytes: int) -> Exchange | None:
    """Zeroed memory of this number of bytes that all ranks share; None if a rank cannot map it.

    All ranks of the group call this together and come to the same answer. Raises `ReplicaError` if a rank is lost.
    """
    reason = "another rank cannot open it"
    with ExitStack() as stack:
        file, token = _offer(num_bytes, stack) if group.rank == 0 else (_NO_FILE, bytes(_TOKEN_BYTES))
        offer = np.array([os.getpid(), file, *_host(), *np.frombuffer(token, np.int64)])
        offers = group.all_gather(torch.from_numpy(offer)[None], dim=0).numpy()
        exchange: Exchange | None = None
        try:
            exchange = _open(offers, num_bytes, group)
        except OSError as error:
            reason = str(error)
        with ExitStack() as until_agreed:
            if exchange is not None:
                until_agreed.callback(exchange.close)
            if group.all_gather(torch.tensor([int(exchange is not None)]), dim=0).all():
                until_agreed.pop_all()
                return exchange
    logger.info("ranks do not exchange sums through shared memory: %s", reason)
    return None


def _host() -> list[int]:
    """Names this boot of this machine and the namespace of its process ids. Raises nothing: an unknown value is 0."""
    try:
        boot, namespace = _BOOT_ID.read_bytes(), _PID_NAMESPACE.stat().st_ino
    except OSError:
        return [0, 0]
    return [int.from_bytes(sha256(boot).digest()[:7], "little"), namespace]


def _offer(num_bytes: int, stack: ExitStack) -> tuple[int, bytes]:
    """A file of zeros in memory behind a random token; `stack` closes it. It takes memory only as it is written to."""
    token = os.urandom(_TOKEN_BYTES)
    try:
        file = os.memfd_create("holdfast-exchange")
        stack.callback(os.close, file)
        os.ftruncate(file, num_bytes)
        os.pwrite(file, token, 0)
    except OSError:
        return _NO_FILE, token
    return file, token


def _open(offers: NDArray[np.int64], num_bytes: int, group: TensorParallelGroup) -> Exchange:
    """Maps the memory that rank 0 offers. Raises OSError if it is missing or not rank 0's."""
    pid, file = offers[0, :2].tolist()
    if file == _NO_FILE:
        raise OSError("rank 0 has no memory to offer")
    if not offers[0, 2] or (offers[:, 2:4] != offers[0, 2:4]).any():
        raise OSError("they are not on one host, or do not see each other's processes")
    memory = _map(f"/proc/{pid}/fd/{file}", num_bytes)
    if memory[:_TOKEN_BYTES] != offers[0, 4:].tobytes():
        raise OSError("the memory is not that of rank 0")
    processes: list[int] = []
    try:
        for other in offers[:, 0].tolist():
            processes.append(os.pidfd_open(other))
    except OSError:
        for process in processes:
            os.close(process)
        raise
    return Exchange(memory, processes, group)


def _map(path: str, num_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != num_bytes:
            raise OSError(f"{path} has not {num_bytes} bytes")
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)


def segments_with_sums(layout: DecoderLayout) -> frozenset[int]:
    """Places after which ranks add partial sums: the embedding, halves of layers, and a shared norm."""
    sums = {0}
    for index, layer in enumerate(layout.layers):
        state, first = layer.state, 3 * index + 1
        shares_norm = isinstance(state, Mamba2) and state.norm_heads > state.num_heads
        mixes = state is not None or layer.attention is not None
        has_sum = (mixes, shares_norm, layer.mlp is not None)
        sums |= {first + part for part, is_there in enumerate(has_sum) if is_there}
    return frozenset(sums)


def tree_sum(group: TensorParallelGroup, partial: Tensor) -> Tensor:
    """The sum of all ranks' partial sums, added as a binary tree over ranks: the upper part of the tree over slices."""
    parts = list(group.all_gather(partial.contiguous().unsqueeze(0), dim=0))
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)] + odd
    total: Tensor = parts[0]
    return total
