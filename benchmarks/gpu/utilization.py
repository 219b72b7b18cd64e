"""Utilization of a GPU while something runs, as its driver tells it."""

import statistics
import threading
from types import TracebackType

import torch

from holdfast.worker.replica.gpu_stats import gpu_watch

_LOOK_EVERY_S = 0.2


class Utilization:
    """A context that looks at a device from a thread of its own; `mean` afterwards, 0 where there is no GPU or NVML."""

    def __init__(self, device: torch.device) -> None:
        self._watch = gpu_watch(device)
        self._seen: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def mean(self) -> float:
        return statistics.fmean(self._seen) if self._seen else 0.0

    def __enter__(self) -> "Utilization":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while self._watch is not None and not self._ended.wait(_LOOK_EVERY_S):
            self._seen.append(self._watch().utilization)
