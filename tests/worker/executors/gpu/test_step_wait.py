"""Waits for a device end: at the event, at the limit, or as soon as nothing good will come; by an injected clock."""

import pytest
import torch

pytest.importorskip("triton")

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.gpu.graphs import Readback, Staging, StepWait

CPU = torch.device("cpu")


class Time:
    """A clock that a pause moves, and an event that has come after so long."""

    def __init__(self, comes_at=float("inf")):
        self.now, self.comes_at, self.pauses, self.given_up = 100.0, 100.0 + comes_at, [], 0

    def clock(self):
        return self.now

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += max(seconds, 1e-4)

    def query(self):
        return self.now >= self.comes_at

    def give_up(self):
        self.given_up += 1

    def wait(self, limit_s=2.0, in_vain=lambda: None):
        return StepWait(limit_s, in_vain, self.give_up, clock=self.clock, pause=self.pause)


@pytest.mark.parametrize("comes_at", [0.0, 0.005, 0.5, 1.9])
def test_an_event_that_comes_is_waited_for(comes_at):
    time = Time(comes_at)
    time.wait().wait(time)
    assert time.now - 100.0 - comes_at < 0.001
    assert not time.given_up
    assert all(pause == 0.0 for pause in time.pauses[:100]), "the first look is at once"
    assert len(time.pauses) < 5000


def test_a_device_that_does_not_come_is_left_at_the_limit():
    time = Time()
    with pytest.raises(ReplicaError, match="the device has not ended a step within 2 s"):
        time.wait().wait(time)
    assert 2.0 <= time.now - 100.0 < 2.01
    assert time.given_up == 1, "what the device itself waits for is ended"


def test_a_wait_in_vain_ends_at_once():
    time = Time()
    wait = time.wait(in_vain=lambda: "rank 1 did not come" if time.now > 100.3 else None)
    with pytest.raises(ReplicaError, match="a step has failed: rank 1 did not come"):
        wait.wait(time)
    assert time.now < 100.31


@pytest.mark.parametrize("event", [Time(0.0), None])
def test_what_has_been_made_without_a_rank_is_not_read(event):
    """A sum that has given up ends as others do."""
    with pytest.raises(ReplicaError, match="rank 1 did not come"):
        StepWait(1.0, lambda: "rank 1 did not come").wait(event)


class Event:
    """Of a device that is still busy."""

    def record(self):
        pass

    def query(self):
        return False


def test_copies_to_and_from_a_device_are_waited_for_so():
    time = Time()
    reading = Readback(CPU, time.wait())
    reading._arrived, reading._is_cuda = [Event(), Event()], True
    found = reading.start(torch.arange(3, dtype=torch.int32))
    with pytest.raises(ReplicaError, match="within 2 s"):
        found.wait()
    staging = Staging(4, CPU, time.wait())
    staging._copied = [Event(), Event()]
    with pytest.raises(ReplicaError, match="within 2 s"):
        staging.free()
