"""A replica whose device does not end a step: the engine's own thread comes back, every caller is answered, in time.

The device is a fake whose event never comes; time is a clock that waiting moves.
"""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from holdfast.worker.config import HealthConfig, SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.executors.gpu.graphs import StepWait
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.pseudo_model import PseudoRunner
from tests.worker.replica.test_lost_collective import Listener, Ranks

TIMEOUT_S = 30


class Device:
    """Its event does not come. A wait looks at it again and again, which takes no time here but on its clock."""

    def __init__(self, group):
        self.group, self.now, self.looked, self.given_up = group, 0.0, threading.Event(), threading.Event()

    def query(self):
        return False

    def pause(self, seconds):
        self.looked.set()
        self.now += 0.5

    def in_vain(self):
        return "the replica has failed" if self.group.is_aborted else None

    def wait(self, limit_s):
        wait = StepWait(limit_s, self.in_vain, self.given_up.set, clock=lambda: self.now, pause=self.pause)
        wait.wait(self)


def serve(device, group, ranks, limit_s):
    """A replica in whose first step the device hangs; its listener, and what is told of its failure."""
    listener, failures = Listener(), []

    class Runner(PseudoRunner):
        def run(self, plan):
            device.wait(limit_s)
            raise AssertionError("the event does not come")

    scheduler = Scheduler(
        SchedulerConfig(), num_blocks=16, block_size=4, max_model_len=32, eos_token_ids=frozenset(), drafter=None
    )
    engine = Engine(scheduler, Runner(16, 4))
    info = SimpleNamespace(row_invariant=False)
    replica = Replica(info, engine, None, group, ranks, HealthConfig(frozen_after_s=1000))
    replica.on_failure(failures.append)
    replica._begin()
    engine.attach(listener)
    for number in range(3):
        params = SamplingParams(max_tokens=4, seed=1)
        engine.submit(EngineRequest(request_id=f"r{number}", prompt_token_ids=(1, 2), sampling_params=params), listener)
    return replica, listener, failures


def test_at_the_deadline_the_replica_fails_and_its_thread_comes_back():
    group, ranks = SingleRank(), Ranks()
    device = Device(group)
    replica, listener, failures = serve(device, group, ranks, limit_s=60.0)
    assert listener.told.wait(TIMEOUT_S)
    assert replica.engine.wait(TIMEOUT_S), "no thread is left behind"
    assert [str(error) for error in listener.failures] == ["the device has not ended a step within 60 s"]
    assert device.given_up.is_set(), "kernels that wait for other ranks are ended"
    assert ranks.ended.wait(TIMEOUT_S)
    assert ranks.killed
    assert 60.0 <= device.now <= 61.0
    assert len(failures) == 1
    replica.stop()


def test_a_rank_that_dies_ends_the_wait_long_before_the_deadline():
    """Its process is seen to end; the abort that follows is what the wait looks at."""
    group, ranks = SingleRank(), Ranks()
    device = Device(group)
    replica, listener, _ = serve(device, group, ranks, limit_s=float("inf"))
    assert device.looked.wait(TIMEOUT_S)
    ranks.ended.set()
    assert replica.engine.wait(TIMEOUT_S)
    assert listener.told.wait(TIMEOUT_S)
    assert len(listener.failures) == 1
    assert device.given_up.is_set()
    replica.stop()
