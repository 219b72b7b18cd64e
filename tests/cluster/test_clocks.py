"""What the dispatch host relies on in a clock, of each that it is given: two event loops, and the simulated one."""

import asyncio
import random
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest

from holdfast.cluster.simulate.kernel.network import Network
from holdfast.cluster.simulate.kernel.process import Process, SettableClock
from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.router.dispatch.dispatch_host import Clock
from tests.loops import LOOPS, runner

COARSE_S = 0.001
"""What uvloop's clock cannot tell: it counts milliseconds."""


class LoopTime:
    """An event loop, whose time passes by itself."""

    def __init__(self, loops: asyncio.Runner) -> None:
        self._runner = loops
        self.clock: Clock = loops.get_loop()

    def do(self, action: Callable[[], None]) -> None:
        """On the clock's own thread, while it runs."""

        async def run() -> None:
            action()

        self._runner.run(run())

    def advance(self, seconds: float) -> None:
        """What was due by then has rung: timers ring in order, and this one is as good as any."""
        self._runner.run(asyncio.sleep(seconds + COARSE_S))


class SimulatedTime:
    """A process whose time is the timeline's."""

    def __init__(self) -> None:
        self._timeline = Timeline()
        process = Process("somewhere", Network(self._timeline, random.Random(1), latency_s=0.001))
        process.start()
        self.clock: Clock = SettableClock(process)

    def do(self, action: Callable[[], None]) -> None:
        action()

    def advance(self, seconds: float) -> None:
        until_s = self._timeline.now + seconds + COARSE_S
        self._timeline.at(until_s, lambda: None)
        while self._timeline.next_s <= until_s:
            self._timeline.step()


@pytest.fixture(params=[*LOOPS, "simulated"])
def time(request: pytest.FixtureRequest) -> Iterator[LoopTime | SimulatedTime]:
    if request.param == "simulated":
        yield SimulatedTime()
        return
    with runner(request.param) as loops:
        yield LoopTime(loops)


Time = LoopTime | SimulatedTime

SOON = {"long past": -1e6, "past": -0.01, "now": 0.0, "in a moment": 0.0002, "nearly 1 ms": 0.0008, "near": 0.003}


@pytest.mark.parametrize("ahead_s", SOON.values(), ids=SOON)
def test_it_rings_once_and_not_early(time: Time, ahead_s: float):
    late_s: list[float] = []

    def set_it() -> None:
        due = time.clock.time() + ahead_s
        time.clock.call_at(due, lambda: late_s.append(time.clock.time() - due))
        assert late_s == [], "not from within call_at: whoever sets an alarm is in the midst of something"

    time.do(set_it)
    time.advance(0.05)
    assert len(late_s) == 1
    assert late_s[0] > -COARSE_S


def test_none_of_many_is_lost(time: Time):
    """Whatever falls between two milliseconds, and however many fall together."""
    rung: list[int] = []

    def set_them() -> None:
        now = time.clock.time()
        for number in range(1000):
            time.clock.call_at(now + number * 1.7e-5 - 0.002, lambda number=number: rung.append(number))

    time.do(set_them)
    time.advance(0.05)
    assert sorted(rung) == list(range(1000))


@pytest.mark.parametrize("ahead_s", [60.0, 1e9, 1e15, float("inf")])
def test_a_far_time_does_not_come_and_can_be_cancelled(time: Time, ahead_s: float):
    rung: list[str] = []

    def set_it() -> None:
        alarm = time.clock.call_at(time.clock.time() + ahead_s, lambda: rung.append("far"))
        time.clock.call_at(time.clock.time() + 0.002, lambda: rung.append("near"))
        time.clock.call_at(time.clock.time() + 0.004, alarm.cancel)

    time.do(set_it)
    time.advance(0.01)
    assert rung == ["near"]


@pytest.mark.parametrize("ahead_s", SOON.values(), ids=SOON)
def test_one_that_is_cancelled_does_not_ring(time: Time, ahead_s: float):
    rung: list[str] = []

    def set_it() -> None:
        alarm = time.clock.call_at(time.clock.time() + ahead_s, lambda: rung.append("cancelled"))
        alarm.cancel()
        alarm.cancel()  # twice is once
        time.clock.call_at(time.clock.time() + ahead_s, lambda: rung.append("another"))

    time.do(set_it)
    time.advance(0.01)
    assert rung == ["another"]


def test_one_that_has_rung_may_be_cancelled(time: Time):
    rung: list[str] = []

    def set_them() -> None:
        for ahead_s in (0.0, 0.003):
            alarm = time.clock.call_at(time.clock.time() + ahead_s, lambda: rung.append("first"))
            time.clock.call_at(time.clock.time() + 0.006, alarm.cancel)
        time.clock.call_at(time.clock.time() + 0.008, lambda: rung.append("later"))

    time.do(set_them)
    time.advance(0.01)
    assert rung == ["first", "first", "later"]


def test_one_may_cancel_another_that_is_due_as_well(time: Time):
    rung: list[str] = []

    def set_them() -> None:
        second = None

        def ring() -> None:
            rung.append("first")
            second.cancel()

        time.clock.call_at(time.clock.time() + 0.003, ring)
        second = time.clock.call_at(time.clock.time() + 0.006, lambda: rung.append("second"))
        time.clock.call_at(time.clock.time() + 0.009, lambda: rung.append("third"))

    time.do(set_them)
    time.advance(0.02)
    assert rung == ["first", "third"]


def test_one_may_cancel_itself_while_it_rings(time: Time):
    rung: list[str] = []

    def set_it() -> None:
        def ring() -> None:
            alarm.cancel()
            rung.append("first")

        alarm = time.clock.call_at(time.clock.time() + 0.002, ring)
        time.clock.call_at(time.clock.time() + 0.005, lambda: rung.append("later"))

    time.do(set_it)
    time.advance(0.01)
    assert rung == ["first", "later"]


def test_they_ring_in_the_order_of_their_times_however_they_were_set(time: Time):
    """If the process does not stand still meanwhile: by as much as it does, uvloop sets an alarm late."""
    rung: list[int] = []

    def are_set_at_once() -> bool:
        time.clock.call_at(time.clock.time() + 1.0, lambda: None).cancel()  # has uvloop look
        began_s, now = monotonic(), time.clock.time()
        alarms = [
            time.clock.call_at(now + 2 * COARSE_S * number, lambda number=number: rung.append(number))
            for number in (7, 2, 9, 4, 1, 8, 3, 6, 5)
        ]
        took_s = monotonic() - began_s
        for alarm in alarms if took_s > COARSE_S else []:
            alarm.cancel()
        return took_s <= COARSE_S

    def set_them() -> None:
        assert any(are_set_at_once() for _ in range(1000))

    time.do(set_them)
    time.advance(0.03)
    assert rung == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_they_ring_late_rather_than_not_at_all(time: Time):
    """Something holds the process up while two alarms become due."""
    rung: list[str] = []

    def set_them() -> None:
        now = time.clock.time()
        time.clock.call_at(now + 0.002, hold_up)
        for name, ahead_s in (("second", 0.004), ("third", 0.006)):
            time.clock.call_at(now + ahead_s, lambda name=name: rung.append(name))

    def hold_up() -> None:
        rung.append("first")
        if isinstance(time, LoopTime):
            sleep(0.01)  # as whatever blocks a loop does

    time.do(set_them)
    time.advance(0.05)
    assert rung == ["first", "second", "third"]


@pytest.mark.parametrize("ahead_s", SOON.values(), ids=SOON)
def test_one_that_rings_may_set_another_for_any_time(time: Time, ahead_s: float):
    """Hundreds in a row, none of them from within another."""
    rung: list[int] = []
    is_ringing = False

    def ring() -> None:
        nonlocal is_ringing
        assert not is_ringing
        is_ringing = True
        rung.append(len(rung))
        if len(rung) < 300:
            time.clock.call_at(time.clock.time() + min(ahead_s, 0.0008), ring)
        is_ringing = False

    time.do(lambda: time.clock.call_at(time.clock.time() + ahead_s, ring))
    for _ in range(100):
        if len(rung) < 300:
            time.advance(0.02)
    assert len(rung) == 300
