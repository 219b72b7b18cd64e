"""Exchange between the ranks of a model on devices: all-reduce, all-gather and the leader's broadcasts within a step.

All sums are binary trees in float32 over all slices of all ranks, so every exchange gives the same bits.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.kernels import ranks
from holdfast.worker.executors.gpu.launches import Launch, Launches, triton_launch
from holdfast.worker.executors.gpu.peer_memory import PeerMemory, share_memory
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

POLL_S: Final = 0.5e-6
"""Assumed time of one look at the flags on a device. It bounds a wait, and need not be exact."""

WORDS: Final[int] = ranks.WORDS.value
PROGRAMS: Final[int] = ranks.PROGRAMS.value
FLAGS: Final[int] = ranks.FLAGS.value
_WARPS: Final = 4  # of a program
_GAVE_UP: Final = -1  # in place of the lost rank

SCATTERED: Final = {4: 384 << 10, 8: 128 << 10}
"""Number of values, by the number of ranks, from which a second wait of some 5 us costs less than the saved transfer at
450 GB/s. Two ranks read no less of each other so.
"""


class RankExchange(Protocol):
    """One rank's end. All ranks make the same calls, with tensors of the same shapes; none waits on the host."""

    on_device: bool
    """Whether the device does everything by itself, so that a CUDA graph can hold it and a step can follow another."""

    def add(self, parts: Tensor, buffers: Buffers) -> Tensor:
        """parts [slices, T, hidden] of this rank -> parts [1, 2, 4 or 8, T, hidden] of the sum over all ranks."""
        ...

    def add_in_place(self, x: Tensor) -> None:
        """Replaces x, float32, by its sum over all ranks."""
        ...

    def gather(self, x: Tensor, name: str, buffers: Buffers) -> Tensor:
        """All ranks' `x` [ranks, ...], of 4 bytes a value. `name` is the buffer's that may hold them."""
        ...

    def gather_to_leader(self, x: Tensor, buffers: Buffers) -> Tensor | None:
        """The leader's: all ranks' columns of x [rows, columns], float32, side by side. None elsewhere. They are in the
        buffer `all logits`, but for a single rank.
        """
        ...

    def take_from_leader(self, words: Tensor) -> None:
        """Replaces `words`, int32, by those of the leader. Only where `on_device`."""
        ...

    def lost(self) -> str | None:
        """Lost ranks, as far as the device has found out. It may report them one step late."""
        ...

    def give_up(self) -> None:
        """Ends waits for other ranks on the device, from any thread. Their results are undefined."""
        ...

    def close(self) -> None: ...


class NoExchange(RankExchange):
    """Exchange of a single rank."""

    on_device = True

    def add(self, parts: Tensor, buffers: Buffers) -> Tensor:
        return parts

    def add_in_place(self, x: Tensor) -> None:
        pass

    def gather(self, x: Tensor, name: str, buffers: Buffers) -> Tensor:
        return x[None]

    def gather_to_leader(self, x: Tensor, buffers: Buffers) -> Tensor | None:
        return x

    def take_from_leader(self, words: Tensor) -> None:
        pass

    def lost(self) -> str | None:
        return None

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class GroupExchange(RankExchange):
    """Exchange by the group's collectives, which the host starts: NCCL on GPUs."""

    on_device = False

    def __init__(self, group: TensorParallelGroup, launches: Launches) -> None:
        self._group = group
        self._launches = launches

    def add(self, parts: Tensor, buffers: Buffers) -> Tensor:
        own = parts[0]
        if len(parts) > 1:
            own = buffers.take("own part", tuple(own.shape))
            self._launches.sum_parts(parts, own)
        return self._group.all_gather(own[None], dim=0)

    def add_in_place(self, x: Tensor) -> None:
        self._launches.sum_parts(self._group.all_gather(x[None], dim=0), x)

    def gather(self, x: Tensor, name: str, buffers: Buffers) -> Tensor:
        return self._group.all_gather(x[None], dim=0)

    def gather_to_leader(self, x: Tensor, buffers: Buffers) -> Tensor | None:
        together = self._group.gather(x)
        if together is None:
            return None
        out = buffers.take("all logits", tuple(together.shape))
        return out.copy_(together)

    def take_from_leader(self, words: Tensor) -> None:
        raise AssertionError("steps follow one another where the device exchanges by itself")

    def lost(self) -> str | None:
        return None  # collectives raise

    def give_up(self) -> None:
        pass  # the group is aborted

    def close(self) -> None:
        pass


class PeerExchange(RankExchange):
    """Exchange by kernels that reach the memory of all ranks. Larger sums go by `others`, or in pieces."""

    on_device = True

    def __init__(
        self,
        memory: PeerMemory,
        group: TensorParallelGroup,
        slot_words: int,
        others: RankExchange,
        device: torch.device,
        launch: Launch = triton_launch,
        scatters_from: int | None = None,
    ) -> None:
        """Each share of `memory` has `share_words(slot_words)` words, zeros. Sums of at least `scatters_from` values
        are scattered and gathered, to the same bits; default: from where a second wait pays off.
        """
        assert slot_words % WORDS == 0, "slots are blocks"
        self._memory = memory
        self._rank = group.rank
        self._size = group.size
        self._slot_words = slot_words
        self._others = others
        self._launch = launch
        lost = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._lost = lost.numpy()  # to be looked at without torch, at every step
        self._shared = {
            "peers": torch.tensor(memory.addresses, dtype=torch.int64, device=device),
            "epochs": torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            "lost": lost,
            "slot_words": slot_words,
            "max_polls": min(2**31 - 1, max(1, int(group.data_timeout_s / POLL_S))),
            "rank": group.rank,
            "RANKS": group.size,
        }
        self._scatters_from = SCATTERED.get(group.size, slot_words + 1) if scatters_from is None else scatters_from
        self._release = weakref.finalize(self, memory.release)
        self._release.atexit = False  # the end of a process gives everything back

    def add(self, parts: Tensor, buffers: Buffers) -> Tensor:
        if parts[0].numel() > self._slot_words:
            return self._others.add(parts, buffers)
        out = buffers.take("summed", (1, *parts.shape[1:]))
        self._add(parts, out)
        return out

    def add_in_place(self, x: Tensor) -> None:
        if x.numel() > self._slot_words:
            self._others.add_in_place(x)
        else:
            self._add(x[None], x)

    def gather(self, x: Tensor, name: str, buffers: Buffers) -> Tensor:
        if x.numel() > self._slot_words:
            return self._others.gather(x, name, buffers)
        out = buffers.take(f"all {name}", (self._size, *x.shape), x.dtype)
        self._gather(x, out, x.numel(), receives=True)
        return out

    def gather_to_leader(self, x: Tensor, buffers: Buffers) -> Tensor | None:
        num_rows, columns = x.shape
        step = self._slot_words // columns
        if step == 0:
            return self._others.gather_to_leader(x, buffers)
        leads = self._rank == 0
        out = buffers.take("all logits", (num_rows, self._size * columns)) if leads else x
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            self._gather(x[rows], out[rows], columns, receives=leads)
        return out if leads else None

    def take_from_leader(self, words: Tensor) -> None:
        assert words.numel() <= self._slot_words, "they are few"
        count = words.numel()
        arguments = {**self._shared, "words": words, "num_words": count, "LEADS": self._rank == 0}
        self._launch(ranks.take_from_leader, _grid(count), arguments, num_warps=_WARPS, num_stages=1)

    def lost(self) -> str | None:
        number = int(self._lost[0])
        if number == 0:
            return None
        return "the wait was cancelled" if number < 0 else f"rank {number - 1} did not join a sum in time"

    def give_up(self) -> None:
        self._lost[0] = _GAVE_UP

    def close(self) -> None:
        """Closing again does nothing. The device has completed all launches, on all ranks."""
        self._release()

    def _add(self, parts: Tensor, out: Tensor) -> None:
        count = parts[0].numel()
        more = {"num_values": count, "PARTS": len(parts), "SCATTERS": count >= self._scatters_from}
        arguments = {**self._shared, "parts": parts, "out": out, **more}
        self._launch(ranks.add_over_ranks, _grid(count), arguments, num_warps=_WARPS, num_stages=1)

    def _gather(self, x: Tensor, out: Tensor, width: int, *, receives: bool) -> None:
        arguments = {
            **self._shared,
            "words": x.view(torch.int32),
            "out": out.view(torch.int32),
            "num_words": x.numel(),
            "width": width,
            "RECEIVES": receives,
        }
        self._launch(ranks.gather_over_ranks, _grid(x.numel()), arguments, num_warps=_WARPS, num_stages=1)


def share_words(slot_words: int) -> int:
    """Words of a rank's share with two slots of this size."""
    return FLAGS + 2 * slot_words


def _grid(num_words: int) -> tuple[int]:
    return (min(PROGRAMS, -(-num_words // WORDS)),)


logger = logging.getLogger(__name__)

Share = Callable[[TensorParallelGroup, int, torch.device], PeerMemory | str]
"""Same as `share_memory`."""

_ROUNDS: Final = 3
"""Rounds of a check, so that both slots are used again."""


def choose_exchange(
    group: TensorParallelGroup,
    num_values: int,
    device: torch.device,
    launch: Launch,
    share: Share | None = None,
) -> RankExchange:
    """The exchange for sums of up to `num_values`. Larger ones go by way of the group.

    All ranks of the group call this together and come to the same answer. `share` is `share_memory` on CUDA devices;
    elsewhere ranks do not share memory without it. Raises `ReplicaError` if a rank is lost.
    """
    if group.size == 1:
        return NoExchange()
    launches = Launches(launch)
    others = GroupExchange(group, launches)
    if share is None and device.type == "cuda":
        share = share_memory
    if share is None:
        return others
    slot_words = -(-num_values // WORDS) * WORDS
    memory = share(group, share_words(slot_words), device)
    if isinstance(memory, str):
        logger.info("sums over ranks are gathered by the group, outside graphs: %s", memory)
        return others
    peers = PeerExchange(memory, group, slot_words, others, device, launch)
    difference = check(peers, others, group, num_values, device, launches)
    if difference is None:
        logger.info("sums over %d ranks are taken by kernels in peers' memory", group.size)
        return peers
    peers.close()
    logger.warning("sums over ranks are gathered by the group, outside graphs: %s", difference)
    return others


def check(
    peers: RankExchange,
    others: RankExchange,
    group: TensorParallelGroup,
    num_values: int,
    device: torch.device,
    launches: Launches,
) -> str | None:
    """Difference between `peers` and `others` in the bits of sums and gathers of some sizes, on any rank; None:
    none.
    """
    difference = None
    generator = torch.Generator().manual_seed(group.rank)
    for size in sorted({1, min(num_values, WORDS * PROGRAMS + 5), num_values}):
        for turn in range(_ROUNDS):
            x = (torch.randn(2, size, generator=generator) * 2.0 ** (8 * turn)).to(device)
            found = (_differing(peers, others, x, launches), _differing_words(peers, group, device))
            difference = difference or found[0] or found[1]  # after both: all ranks make all calls
    if (lost := peers.lost()) is not None:
        difference = lost
    fine = group.all_gather(torch.tensor([int(difference is None)]), dim=0)
    return None if bool(fine.all()) else difference or "another rank has found a difference"


def _differing(peers: RankExchange, others: RankExchange, x: Tensor, launches: Launches) -> str | None:
    """Difference for x [2, values], two slices of this rank."""
    ours, theirs = Buffers(x.device), Buffers(x.device)
    pairs = {
        "sums": (_sum(peers, x, ours, launches), _sum(others, x, theirs, launches)),
        "gathered values": (peers.gather(x[0], "x", ours), others.gather(x[0], "x", theirs)),
        "values at the leader": (peers.gather_to_leader(x, ours), others.gather_to_leader(x, theirs)),
    }
    for what, (one, other) in pairs.items():
        if one is not None and other is not None and not torch.equal(one, other):
            return f"{what} in peers' memory are not those of the group"
    return None


def _differing_words(peers: RankExchange, group: TensorParallelGroup, device: torch.device) -> str | None:
    expected = torch.arange(PROGRAMS, dtype=torch.int32, device=device)
    words = expected.clone() if group.rank == 0 else torch.zeros_like(expected)
    peers.take_from_leader(words)
    return None if torch.equal(words, expected) else "the leader's words do not arrive in peers' memory"


def _sum(exchange: RankExchange, x: Tensor, buffers: Buffers, launches: Launches) -> Tensor:
    """Sum of all slices of all ranks [1, values]."""
    parts = exchange.add(x[:, None], buffers)
    total = torch.empty_like(parts[0])
    launches.sum_parts(parts, total)
    return total
