"""CUDA graphs of decode steps: one for each number of rows that steps are padded to."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.errors import ReplicaError

BUCKETS: Final = (1, 2, 4, *range(8, 257, 8))
"""Rows of a captured decode step. Larger ones are launched kernel by kernel, which they hide."""


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None: ...


class Movable(Protocol):
    """Buffers that graphs read."""

    @property
    def generation(self) -> int:
        """Moves when a buffer has moved."""
        ...


@dataclass(frozen=True, slots=True)
class AllBuffers:
    """Several buffers that graphs read."""

    each: tuple[Movable, ...]

    @property
    def generation(self) -> int:
        return sum(one.generation for one in self.each)


Capture = Callable[[Callable[[], None]], Graph]
"""Captures work that has run before, and runs none of it."""


def cuda_capture(work: Callable[[], None], pool: Any = None, *, warms_up: bool = False) -> Graph:
    """Captures on a separate stream, as torch requires. Other threads may use the device meanwhile, as NCCL's own does.
    Graphs that never run at the same time, and whose private memory is not read after the next one has run, may share a
    `pool` (`torch.cuda.graph_pool_handle`).

    `warms_up` runs the work once more on that stream, for libraries that keep memory for each stream, as cuBLAS does;
    not for work that ranks count.
    """
    make_stream: Any = torch.cuda.Stream  # torch does not say its type
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    if warms_up:
        with torch.cuda.stream(stream):
            work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


def bucket_of(num_rows: int) -> int | None:
    """The rows that a decode step is padded to; None: it is not captured."""
    return next((bucket for bucket in BUCKETS if num_rows <= bucket), None)


def buckets_up_to(max_rows: int) -> list[int]:
    """The rows of all graphs that steps of up to `max_rows` rows run in, most first: later ones use their memory."""
    last = bucket_of(max_rows) or BUCKETS[-1]
    return [bucket for bucket in reversed(BUCKETS) if bucket <= last]


class DecodeGraphs:
    """The graphs of one executor, by what of a step is fixed in them."""

    def __init__(self, capture: Capture | None) -> None:
        """Runs work without graphs if there is no `capture`."""
        self._capture = capture
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._generation = 0
        self.num_captured = 0

    @property
    def are_used(self) -> bool:
        return self._capture is not None

    def run(self, key: tuple[object, ...], buffers: Movable, work: Callable[[], None]) -> None:
        """Runs the work once: by the graph of this key, or as it is, and then captures it for the next time.

        Never twice: ranks count launches, and whether a rank has a graph already depends on more than the step. The
        work has the same effect each time for the same key and the same contents of buffers.
        """
        if self._capture is None:
            work()
            return
        if buffers.generation != self._generation:
            self.clear()
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # buffers move here, not in the capture
        if buffers.generation != self._generation:
            self.clear()
            self._generation = buffers.generation
        self._graphs[key] = self._capture(work)
        self.num_captured += 1

    def clear(self) -> None:
        """Drops all graphs; before a group of ranks is closed, or its teardown waits for them."""
        self._graphs.clear()


_BUSY_S: Final = 0.02
"""Seconds that a wait polls without sleeping, as CUDA's own does: a sleep would take longer than the rest of a step."""
_PAUSE_S: Final = 0.0005


class Event(Protocol):
    """Event of a device."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class StepWait:
    """Waits, but not for ever. Any thread may use it; a waiting thread lets the others run."""

    def __init__(
        self,
        limit_s: float,
        in_vain: Callable[[], str | None] = lambda: None,
        give_up: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`in_vain` gives the reason why waiting is useless, or None. `give_up` is called before a wait ends in an
        error: it ends waits on the device itself.
        """
        self._limit_s = limit_s
        self._in_vain = in_vain
        self._give_up = give_up
        self._clock = clock
        self._pause = pause

    def wait(self, event: Event | None) -> None:
        """Returns when the device has come to the event, or at once without one.

        Raises `ReplicaError` after the limit, or when waiting is in vain: then also if the device has finished, since
        its results mean nothing.
        """
        if event is not None and not event.query():
            self._look_until(event, self._clock())
        if (reason := self._in_vain()) is not None:
            self._fail(f"a step has failed: {reason}")

    def _look_until(self, event: Event, began_s: float) -> None:
        while not event.query():
            waited_s = self._clock() - began_s
            if waited_s >= self._limit_s:
                self._fail(f"the device has not ended a step within {self._limit_s:g} s")
            if (reason := self._in_vain()) is not None:
                self._fail(f"a step has failed: {reason}")
            self._pause(0.0 if waited_s < _BUSY_S else _PAUSE_S)

    def _fail(self, what: str) -> None:
        self._give_up()
        raise ReplicaError(what)


class Buffers:
    """Memory that steps use one after the other, by name. It grows, and then graphs that read it are of no use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, Tensor] = {}
        self.generation = 0
        """Moves when a buffer has moved."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with whatever is in there; the same memory for the same name."""
        count = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < count or memory.dtype != dtype:
            self.generation += memory is not None
            memory = self._memory[name] = torch.empty(count, dtype=dtype, device=self.device)
        return memory[:count].view(shape)

    def take_zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like `take`, for memory that is zero at first."""
        memory = self._memory.get(name)
        tensor = self.take(name, shape, dtype)
        if self._memory[name] is not memory:
            self._memory[name].zero_()
        return tensor


_NUM_STAGES: Final = 2
"""Copies that may be on their way while the next step is written."""


class Staging:
    """Arrays of int32 on the host, which are filled in turns and copied to a device without a wait."""

    def __init__(self, size: int, device: torch.device, wait: StepWait) -> None:
        self._wait = wait
        is_cuda = device.type == "cuda"
        self._stages = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGES)]
        make_event: Any = torch.cuda.Event  # torch does not say its type
        self._copied = [make_event() for _ in range(_NUM_STAGES)] if is_cuda else []
        self._next = 0

    @property
    def size(self) -> int:
        return len(self._stages[0])

    def free(self) -> Tensor:
        """The array whose turn it is. No copy reads it any longer."""
        if self._copied:
            self._wait.wait(self._copied[self._next])
        return self._stages[self._next]

    def copy(self, target: Tensor) -> None:
        """Copies the beginning of this turn's array to `target`, flat; the next turn is another one's."""
        target.copy_(self._stages[self._next][: len(target)], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next = (self._next + 1) % _NUM_STAGES


_FEWEST_READ: Final = 1 << 14
"""Fewest bytes read back: those of 256 rows with log-probabilities."""


class Reading:
    """Numbers on their way from a device."""

    def __init__(self, host: Tensor, shape: tuple[int, ...], arrived: Any, wait: StepWait) -> None:
        """`arrived` is an event of the device, or None if there is nothing to wait for."""
        self._wait = wait
        self._host = host
        self._shape = shape
        self._arrived = arrived

    def wait(self) -> NDArray[np.int32]:
        """The numbers. Must be read before all other stages have been started once. Raises `ReplicaError` as
        `StepWait.wait` does.
        """
        self._wait.wait(self._arrived)
        numbers: NDArray[np.int32] = self._host.numpy().reshape(self._shape)
        return numbers


class Readback:
    """Copies int32 from a device to the host without a wait, for some steps in turn."""

    def __init__(self, device: torch.device, wait: StepWait) -> None:
        self._wait = wait
        self._is_cuda = device.type == "cuda"
        self._host_device = torch.device("meta" if device.type == "meta" else "cpu")
        self._stages = [self._stage(_FEWEST_READ) for _ in range(_NUM_STAGES)]
        make_event: Any = torch.cuda.Event  # torch does not say its type
        self._arrived: list[Any] = [make_event() if self._is_cuda else None for _ in range(_NUM_STAGES)]
        self._next = 0

    def start(self, source: Tensor) -> Reading:
        """Begins with a contiguous tensor of the device."""
        turn, count = self._next, source.numel()
        self._next = (turn + 1) % _NUM_STAGES
        if count > len(self._stages[turn]):
            self._stages[turn] = self._stage(1 << count.bit_length())
        host = self._stages[turn][:count]
        host.copy_(source.view(-1), non_blocking=True)
        if self._is_cuda:
            self._arrived[turn].record()
        return Reading(host, tuple(source.shape), self._arrived[turn], self._wait)

    def _stage(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._host_device, pin_memory=self._is_cuda)
