"""Tensor-parallel group: all-reduce and all-gather of activations between ranks, and the leader's broadcasts.

Sums are taken in rank order, so every rank gets the same bits, and a value's bits depend neither on the size of the
message nor on its place in it. Half types are added in float32 and rounded once.

The private APIs of PyTorch that Holdfast uses, all of them, are here, as they were read in PyTorch 2.13.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # declared there; `torch.distributed` has it without a type

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.peer_sockets import PeerSockets
from holdfast.worker.executors.rendezvous import RankListener, Rendezvous, meet


def abort_process_group() -> None:
    """Ends the collectives that wait on NCCL, after a rank was lost; from any thread. Raises `RuntimeError` where there
    is no group.
    """
    dist.distributed_c10d._abort_process_group()


Message = NDArray[np.int64]


class TensorParallelGroup(Protocol):
    """The ranks of one replica, seen from one of them. Rank 0 is the leader. All ranks make the same calls in order."""

    rank: int
    size: int
    data_timeout_s: float = 60.0
    """After this long a rank that others wait for in a sum counts as lost."""
    is_aborted: bool = False
    """Whether a rank was lost: then no rank waits for others. Any thread may look."""
    own_host: str = ""
    """Address of this rank's host by which the leader reaches it; empty on the leader."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added in rank order. May overwrite `x`. Raises `ReplicaError` if a rank is lost."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' `x`, concatenated in rank order. Raises `ReplicaError` if a rank is lost."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """The leader's: all ranks' `x`, side by side in the last dimension in rank order. None elsewhere. Raises
        `ReplicaError` if a rank is lost.
        """
        together = self.all_gather(x)
        return together if self.rank == 0 else None

    def broadcast(self, message: Message | None) -> Message:
        """The leader's int64 array, on every rank. Followers pass None and block, however long it takes.

        The leader may return before the followers have it. Raises `ReplicaError` if a rank is lost.
        """
        ...

    def abort(self) -> None:
        """Ends all waits for other ranks, after one was lost; from any thread. It may take forever itself."""
        self.is_aborted = True

    def close(self) -> None:
        """Delivers pending broadcasts and leaves the group."""
        ...


class SingleRank(TensorParallelGroup):
    """A replica of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, message: Message | None) -> Message:
        assert message is not None, "a leader broadcasts a message"
        return message

    def close(self) -> None:
        pass


class _RankLoss:
    """Inside it, errors of sockets and of torch.distributed become `ReplicaError`. A class: a generator costs more."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError):
            raise ReplicaError(f"{self._what}: {error}") from error


_LOST = _RankLoss("a rank of the replica was lost")


class DistributedGroup(TensorParallelGroup):
    """Ranks in separate processes. All of them prove to each other that they know the secret of the rendezvous.

    Orders and activations in main memory go over one connection to each rank (`peer_sockets.py`), and activations on
    GPUs over NCCL; then there is one group per process at a time, since torch.distributed's default group belongs to
    the process.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        *,
        backend: Literal["sockets", "nccl"] = "sockets",
        device: torch.device | str = "cpu",
        listener: RankListener | None = None,
        start_timeout_s: float = 120.0,
        data_timeout_s: float = 60.0,
    ) -> None:
        """Waits at `rendezvous`, where rank 0 listens, until all ranks are there. `listener`: rank 0 listens already.

        Raises `ReplicaError` when they are not after `start_timeout_s`. A sum or gather that takes longer than
        `data_timeout_s` counts as a lost rank.
        """
        self.rank = rank
        self.size = size
        self.data_timeout_s = data_timeout_s
        self._has_nccl = backend == "nccl"
        with _RankLoss(f"rank {rank} of {size} could not join its replica at {rendezvous}"):
            self._join(rendezvous, torch.device(device), listener, start_timeout_s)

    def _join(
        self, rendezvous: Rendezvous, device: torch.device, listener: RankListener | None, start_timeout_s: float
    ) -> None:
        store: TCPStore | None = None

        def notice() -> str:
            nonlocal store
            store = _served_store(rendezvous.host, self.size, start_timeout_s) if self._has_nccl else None
            return "" if store is None else str(store.port)

        met = meet(self.rank, self.size, rendezvous, start_timeout_s, listener=listener, notice=notice)
        self._sockets = PeerSockets(met.peers, self.data_timeout_s)
        if self.rank > 0:
            self.own_host = self._sockets.own_host
        if self._has_nccl:
            limit = timedelta(seconds=start_timeout_s)
            store = store or TCPStore(rendezvous.host, int(met.notice), self.size, is_master=False, timeout=limit)
            dist.init_process_group(
                "nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.data_timeout_s),
                device_id=device,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        with _LOST:
            return ordered_sum(self._gather(x.contiguous()))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        with _LOST:
            return torch.cat(self._gather(x.contiguous()), dim)

    def gather(self, x: Tensor) -> Tensor | None:
        if x.device.type == "cpu":
            return super().gather(x)
        with _LOST:
            leads = self.rank == 0
            together = x.new_empty((self.size, *x.shape)) if leads else None
            parts = None if together is None else list(together.unbind(0))
            dist.gather(x.contiguous(), parts, dst=0)
            return None if parts is None else torch.cat(parts, -1)

    def broadcast(self, message: Message | None) -> Message:
        with _LOST:
            if self.rank > 0:
                return self._sockets.receive()
            assert message is not None, "a leader broadcasts a message"
            self._sockets.send(message)
            return message

    def abort(self) -> None:
        self.is_aborted = True
        if self._has_nccl:  # the calls of sockets end by themselves when a peer is gone
            with suppress(RuntimeError):
                abort_process_group()

    def close(self) -> None:
        self._sockets.close()
        if self._has_nccl:
            dist.destroy_process_group()

    def _gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`: sent straight to each from main memory; on GPUs by NCCL into one tensor, without copies."""
        if x.device.type == "cpu":
            return self._sockets.exchange(x)
        together = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(together, x)
        return list(together.unbind(0))


def _served_store(host: str, size: int, timeout_s: float) -> TCPStore:
    """Store in which NCCL's ranks find its unique id, the only entry: it listens on the one address that ranks reach.

    torch's store has no authentication, and would listen on every interface by itself.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' parts, in rank order. Half types are added in float32 and rounded once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
