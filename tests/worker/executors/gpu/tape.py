"""A CUDA graph's stand-in: torch operations and kernel launches are taped once, and repeated on the same tensors.

As with a graph, Python runs once: a value, a size or a tensor that it has chosen stays what it was, and what a repeated
step reads must lie where it lay.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from holdfast.worker.executors.gpu.launches import Launch


class Tape:
    """One captured piece of work."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.names = Counter[str]()

    def replay(self) -> None:
        for step in self.steps:
            step()


class Taping(TorchDispatchMode):
    """Writes operations on a tape while they run."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._tape.names[func.overloadpacket.__name__] += 1
        inside = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self._tape.steps.append(lambda: func(*args, **kwargs))
        elif not all(_memory(output) in inside for output in outputs):  # views are views of what is repeated

            def again() -> None:
                for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    old.copy_(new)

            self._tape.steps.append(again)
        return result


class TapingDevice:
    """Captures work on tapes; launches go through it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._tape: Tape | None = None
        self.tapes: list[Tape] = []

    def capture(self, work: Callable[[], None]) -> Tape:
        self._tape = tape = Tape()
        try:
            with Taping(tape):
                work()
        finally:
            self._tape = None
        self.tapes.append(tape)
        return tape

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], *, num_warps: int, num_stages: int
    ) -> None:
        def run() -> None:
            with _disable_current_modes():
                self._launch(kernel, grid, arguments, num_warps=num_warps, num_stages=num_stages)

        if self._tape is not None:
            self._tape.names["launch"] += 1
            self._tape.steps.append(run)
        run()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
