"""GPU figures of a replica: utilization and memory of the leading rank's device, as its driver tells them. Memory comes
from the CUDA runtime, utilization from NVML, which torch reads through `nvidia-ml-py`: where that is not installed it
stays 0.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.worker.step_update import GpuStats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Driver(Protocol):
    """Functions of `torch.cuda` that are used."""

    def mem_get_info(self, device: "torch.device") -> tuple[int, int]:
        """Free and total bytes."""

    def utilization(self, device: "torch.device") -> int:
        """Per cent of the last moments in which a kernel ran. Raises what NVML raises."""


class GpuWatch:
    """Measures one device. A query that its driver refuses is logged once and not repeated."""

    def __init__(self, driver: Driver, device: "torch.device") -> None:
        self._driver = driver
        self._device = device
        self._tells_utilization = True

    def __call__(self) -> GpuStats:
        free, total = self._driver.mem_get_info(self._device)
        return GpuStats(utilization=self._utilization() / 100, memory_used_bytes=total - free, memory_total_bytes=total)

    def _utilization(self) -> int:
        if not self._tells_utilization:
            return 0
        try:
            return self._driver.utilization(self._device)
        except Exception as refused:  # noqa: BLE001 - a module that is missing, or any error of NVML
            self._tells_utilization = False
            logger.info("the GPU's utilization is not known: %s", refused)
            return 0


def gpu_watch(device: "torch.device") -> Callable[[], GpuStats] | None:
    """Statistics of a leading rank's device; None if it is no GPU."""
    if device.type != "cuda":
        return None
    import torch

    return GpuWatch(torch.cuda, device)
