"""CUDA graphs of decode steps: one for each number of rows that steps are padded to.

What may live here: which graph a step uses, when it is captured, and when it is stale. What may not: what is captured
(`executor.py`).
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

BUCKETS: Final = (1, 2, 4, *range(8, 257, 8))
"""Rows of a captured decode step. Larger ones are launched kernel by kernel, which they hide."""


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None: ...


class Movable(Protocol):
    """Buffers that graphs read."""

    generation: int
    """Moves when a buffer has moved."""


Capture = Callable[[Callable[[], None]], Graph]
"""Captures work that has run before, and runs none of it."""


def cuda_capture(work: Callable[[], None], pool: Any = None, *, warms_up: bool = False) -> Graph:
    """Captures on a stream of its own, as torch asks for. Other threads may use the device meanwhile, as NCCL's own
    does. Graphs that never run at the same time, and of which each leaves nothing in memory of its own that is read
    after the next one, may share a `pool` (`torch.cuda.graph_pool_handle`).

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


class DecodeGraphs:
    """The graphs of one executor, by what of a step is fixed in them."""

    def __init__(self, capture: Capture | None) -> None:
        """Without `capture`, work runs as it is."""
        self._capture = capture
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._generation = 0
        self.num_captured = 0

    @property
    def are_used(self) -> bool:
        return self._capture is not None

    def run(self, key: tuple[object, ...], buffers: Movable, work: Callable[[], None]) -> None:
        """Runs the work once: by the graph of this key, or as it is, and then captures it for the next time.

        Never twice: ranks count what runs, and which of them has a graph already depends on more than the step. The
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
