"""A probe looks until it is stopped, also after a look that has failed."""

import threading

from holdfast.worker.replica.probe_loop import ProbeLoop, probed

LIMIT_S = 30


class Looks:
    """Counts looks, each of which fails."""

    def __init__(self, enough: int) -> None:
        self.number = 0
        self._enough = enough
        self.are_enough = threading.Event()

    def __call__(self) -> None:
        self.number += 1
        if self.number >= self._enough:
            self.are_enough.set()
        raise ConnectionError("the GCS is away")


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_a_look_that_fails_is_not_the_last():
    looks = Looks(3)
    with probed(ProbeLoop("test-looks", 0.001, looks)):
        assert looks.are_enough.wait(LIMIT_S)
    assert looks.number >= 4, "and once more in the end"
    assert not is_running("test-looks")


def test_each_probe_looks_at_once_and_a_slow_one_holds_up_no_other():
    may_go_on, quick = threading.Event(), Looks(1)
    with probed(ProbeLoop("slow", 3600, lambda: may_go_on.wait(LIMIT_S)), ProbeLoop("quick", 3600, quick)):
        assert quick.are_enough.wait(LIMIT_S)
        may_go_on.set()
    assert quick.number == 2, "at once, and in the end"


def test_a_probe_that_waits_first_and_is_stopped_does_not_look():
    looks = Looks(1)
    loop = ProbeLoop("test-looks", 3600, looks, at_once=False)
    loop.start()
    loop.stop()
    loop.finish()
    assert looks.number == 1, "the last look alone"


def test_a_look_may_stop_its_own_probe():
    ended, numbers = threading.Event(), list[int]()

    def look() -> None:
        numbers.append(len(numbers))
        loop.stop()
        ended.set()

    loop = ProbeLoop("test-looks", 0.001, look)
    loop.start()
    assert ended.wait(LIMIT_S)
    loop._thread.join(LIMIT_S)
    assert numbers == [0]
