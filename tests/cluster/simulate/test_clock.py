"""A clock in virtual time: alarms ring as an event loop's would, by the clock of a process that can be set."""

import random

from holdfast.cluster.simulate.kernel.network import Network
from holdfast.cluster.simulate.kernel.process import EARLY_S, Process, SettableClock
from holdfast.cluster.simulate.kernel.timeline import Timeline


class Watched:
    """A process with a clock; `rung` says when in the world its alarms rang."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.process = Process("somewhere", Network(self.timeline, random.Random(1), latency_s=0.001))
        self.process.start()
        self.clock = SettableClock(self.process)
        self.rung: list[float] = []

    def alarm(self, when: float):
        return self.clock.call_at(when, lambda: self.rung.append(round(self.timeline.now, 3)))

    def jump(self, seconds: float) -> None:
        self.process.clock_offset_s += seconds
        self.clock.note_set()

    def run(self) -> None:
        while self.timeline.step():
            pass


def test_alarms_ring_once_and_a_little_early():
    watched, times = Watched(), []
    watched.clock.call_at(2.0, lambda: times.append(watched.clock.time()))
    watched.alarm(1.0)
    watched.run()
    assert watched.rung == [1.0]
    assert len(times) == 1
    assert 2.0 - 2 * EARLY_S < times[0] < 2.0


def test_a_cancelled_alarm_does_not_ring():
    watched = Watched()
    watched.alarm(1.0).cancel()
    watched.run()
    assert watched.rung == []


def test_alarms_go_by_the_clock_when_it_is_set():
    for seconds, expected in ((0.4, [0.6]), (5.0, [0.0]), (-0.5, [1.5])):
        watched = Watched()
        watched.alarm(1.0)
        watched.jump(seconds)
        watched.run()
        assert watched.rung == expected


def test_an_alarm_that_is_due_while_the_process_is_frozen_rings_once_it_goes_on():
    watched = Watched()
    watched.alarm(1.0)
    watched.process.freeze()
    watched.timeline.at(3.0, watched.process.thaw)
    watched.run()
    assert watched.rung == [3.0]


def test_the_alarms_of_a_life_end_with_it():
    watched = Watched()
    watched.alarm(1.0)
    watched.process.kill()
    watched.process.start()
    watched.run()
    assert watched.rung == []
