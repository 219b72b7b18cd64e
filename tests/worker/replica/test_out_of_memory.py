"""A step for which there is no memory, on any rank, loses the replica: every caller hears, and no process stays."""

import pytest
import torch

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.worker.config import ModelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.engine import model_runner
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import Message, SingleRank
from holdfast.worker.models import loading
from holdfast.worker.models.memory import is_failed_allocation
from holdfast.worker.replica.rank import run_rank
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepPlan, StepResult
from tests.pseudo_model import PseudoRunner
from tests.worker.engine.engines import Recorder, make_engine, make_request

FAILURES = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
]
EVERY_FAILURE = pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)


class Starved(PseudoRunner):
    """A leader's runner that finds no memory for its third step."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self._failure = failure

    def run(self, plan: StepPlan) -> StepResult:
        if self.num_steps == 2:
            raise self._failure
        return super().run(plan)


@EVERY_FAILURE
def test_a_leader_without_memory_answers_everyone(failure):
    engine, runner, recorder = make_engine(Starved(failure))
    second = Recorder()
    engine.attach(second)
    engine.submit(make_request("r"), recorder)
    for listener in (recorder, second):
        listener.wait_for(lambda listener=listener: listener.failure is not None)
        assert isinstance(listener.failure, ReplicaError)
    with pytest.raises(ReplicaError):
        engine.submit(make_request("s"), recorder)
    engine.stop()
    assert runner.closed


def test_a_listener_that_finds_no_memory_for_the_news_keeps_it_from_nobody_else():
    class Full(Recorder):
        def on_failure(self, error) -> None:
            raise MemoryError

    engine, _, recorder = make_engine(Starved(MemoryError()))
    engine.attach(Full())
    last = Recorder()
    engine.attach(last)
    engine.submit(make_request("r"), recorder)
    last.wait_for(lambda: last.failure is not None)
    engine.stop()


@EVERY_FAILURE
def test_a_rank_without_memory_leaves_its_group_and_ends(failure, monkeypatch):
    class StarvedRank:
        def take_part(self, batch: StepBatch) -> None:
            raise failure

    class Group(SingleRank):
        is_left = False

        def broadcast(self, message: Message | None) -> Message:
            return StepBatch.of(one_step()).packed()

        def close(self) -> None:
            self.is_left = True

    group = Group()
    monkeypatch.setattr("holdfast.worker.replica.rank.join", lambda *_: group)
    monkeypatch.setattr("holdfast.worker.replica.rank.prepare_process", lambda *_: None)
    monkeypatch.setattr("holdfast.worker.engine.model_runner.ModelRunner.load", lambda *_, **__: StarvedRank())
    with pytest.raises(type(failure)):
        run_rank(WorkerConfig(), 1, Rendezvous.at("127.0.0.1", 1), torch.device("cpu"))
    assert group.is_left


def one_step() -> StepPlan:
    scheduler = Scheduler(SchedulerConfig(), num_blocks=8, block_size=4, max_model_len=20, eos_token_ids=frozenset())
    scheduler.add(make_request("r"))
    return scheduler.plan()


# --- while it is loaded ---


@EVERY_FAILURE
def test_a_model_that_finds_no_memory_is_told_with_the_ways_out(failure, monkeypatch):
    def starve(*arguments) -> None:
        raise failure

    monkeypatch.setattr(model_runner, "load_model", starve)
    with pytest.raises(ConfigurationError) as found:
        ModelRunner.load(WorkerConfig(), SingleRank(), device=torch.device("cpu"))
    said = str(found.value)
    assert "out of memory while it was loaded" in said
    assert "of memory are left" in said
    assert "lower --kv-cache-memory" in said
    assert "\n" not in said


@pytest.mark.parametrize("other", [RuntimeError("size mismatch"), OSError(2, "no such file")])
def test_what_is_no_want_of_memory_keeps_its_own_words(other, monkeypatch):
    def fail(*arguments) -> None:
        raise other

    monkeypatch.setattr(model_runner, "load_model", fail)
    with pytest.raises(type(other), match=str(other).rpartition("] ")[2]):
        ModelRunner.load(WorkerConfig(), SingleRank(), device=torch.device("cpu"))


def test_torch_says_so_itself_as_it_is_found_out():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_failed_allocation(found.value)


def test_weights_larger_than_what_is_left_are_refused_before_they_are_read(monkeypatch):
    config = WorkerConfig(model=ModelConfig(model=str(bundled_path("demo"))))
    monkeypatch.setattr(loading, "memory_left", lambda device: 2**20)
    monkeypatch.setattr(loading, "load_backend", None)
    with pytest.raises(ConfigurationError, match=r"the weights of a rank take .*, and 1 MiB of memory are left; lower"):
        ModelRunner.load(config, SingleRank(), device=torch.device("cpu"))
