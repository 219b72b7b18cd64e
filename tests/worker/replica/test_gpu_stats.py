"""GPU figures, from a driver that is made up."""

import torch

from holdfast.worker.replica.gpu_stats import GpuWatch, gpu_watch
from holdfast.worker.step_update import GpuStats


class FakeDriver:
    def __init__(self, utilization: int | Exception) -> None:
        self.answer = utilization
        self.num_asked = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 30, 80

    def utilization(self, device: torch.device) -> int:
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_memory_and_utilization_are_the_drivers():
    watch = GpuWatch(FakeDriver(75), torch.device("cuda", 0))
    assert watch() == GpuStats(utilization=0.75, memory_used_bytes=50, memory_total_bytes=80)


def test_what_a_driver_does_not_tell_is_zero_and_is_asked_for_once():
    driver = FakeDriver(ModuleNotFoundError("pynvml does not seem to be installed"))
    watch = GpuWatch(driver, torch.device("cuda", 0))
    assert watch() == watch() == GpuStats(utilization=0.0, memory_used_bytes=50, memory_total_bytes=80)
    assert driver.num_asked == 1


def test_a_cpu_has_none():
    assert gpu_watch(torch.device("cpu")) is None
