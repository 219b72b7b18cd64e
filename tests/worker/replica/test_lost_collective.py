"""A replica whose rank was lost while its leader waits in a collective that hangs, fails or returns late.

The collective is a fake, as NCCL's would be: the leader's thread is inside it, and only an abort may bring it back.
"""

import threading
from types import SimpleNamespace

import pytest

from holdfast.worker.config import HealthConfig, SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import ReplicaError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.pseudo_model import PseudoRunner

TIMEOUT_S = 30


class Collective:
    """Waits for a rank that is gone. `outcome`: what an abort makes of it."""

    rank, size = 0, 2

    def __init__(self, outcome):
        self.outcome = outcome
        self.entered, self.left, self.released = threading.Event(), threading.Event(), threading.Event()

    def wait(self):
        self.entered.set()
        self.released.wait(TIMEOUT_S)
        self.left.set()
        if self.outcome == "fails":
            raise ReplicaError("NCCL communicator was aborted")

    def abort(self):
        if self.outcome != "hangs":
            self.released.set()

    def close(self):
        pass


class Ranks:
    """The other rank, which ends when told."""

    def __init__(self):
        self.ended, self.killed = threading.Event(), False

    def wait(self):
        self.ended.wait(TIMEOUT_S)
        return "rank 1 ended with code -9"

    def stop(self):
        self.kill()

    def kill(self):
        self.killed = True
        self.ended.set()


class Listener:
    def __init__(self):
        self.failures, self.told = [], threading.Event()

    def on_update(self, update):
        pass

    def on_failure(self, error):
        self.failures.append(error)
        self.told.set()


@pytest.mark.parametrize("outcome", ["hangs", "fails", "returns late"])
def test_every_caller_is_answered_and_the_process_goes_on(outcome):
    collective, ranks, listener, failed = Collective(outcome), Ranks(), Listener(), threading.Event()

    class Runner(PseudoRunner):
        def run(self, plan):
            collective.wait()
            return super().run(plan)

    scheduler = Scheduler(
        SchedulerConfig(), num_blocks=16, block_size=4, max_model_len=32, eos_token_ids=frozenset(), drafter=None
    )
    engine = Engine(scheduler, Runner(16, 4))
    info = SimpleNamespace(row_invariant=False)
    replica = Replica(info, engine, None, collective, ranks, HealthConfig(frozen_after_s=1000))
    replica.end_limit_s = 0.05 if outcome == "hangs" else TIMEOUT_S
    replica.on_failure(lambda error: failed.set())
    replica._begin()
    engine.attach(listener)
    params = SamplingParams(max_tokens=4, seed=1)
    engine.submit(EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling_params=params), listener)
    assert collective.entered.wait(TIMEOUT_S)
    ranks.ended.set()
    assert failed.wait(TIMEOUT_S)
    assert listener.told.wait(TIMEOUT_S)
    assert "rank" in str(listener.failures[0]) or "NCCL" in str(listener.failures[0])
    assert len(listener.failures) == 1
    assert ranks.killed
    assert collective.left.is_set() == (outcome != "hangs")
    collective.released.set()
    replica.stop()
    assert engine.wait(TIMEOUT_S)
