"""A replica that computes wrongly is found by a question that it has answered before, and a healthy one never is."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.pseudo_model import PseudoRunner
from tests.worker.scheduling import BLOCK_SIZE, make_request, make_scheduler
from worker.canary import Canary
from worker.config import (
    CacheConfig,
    HealthConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from worker.engine import Engine
from worker.engine_updates import EngineUpdate
from worker.errors import HoldfastError, ReplicaError
from worker.known_answer import NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS
from worker.linear import Linear
from worker.model_runner import ModelRunner, follow
from worker.plan import StepPlan, StepResult
from worker.replica import Replica
from worker.request import EngineRequest
from worker.sampling_params import SamplingParams
from worker.tensor_parallel import SingleRank

TIMEOUT_S = 60
SELDOM = HealthConfig(self_check_every_s=3600)
"""The test asks, and nobody else."""


class Listener:
    def __init__(self) -> None:
        self.failed = threading.Event()
        self.error: HoldfastError | None = None

    def on_update(self, update: EngineUpdate) -> None:
        pass

    def on_failure(self, error: HoldfastError) -> None:
        self.error = error
        self.failed.set()


# --- a pseudo-model: when it is asked, and what counts as an answer ---


class Rotting(PseudoRunner):
    """Draws another token once it is rotten; stands still while it is held."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.is_rotten = False
        self.entered, self.may_step = threading.Event(), threading.Event()
        self.may_step.set()

    def hold(self) -> None:
        self.entered.clear()
        self.may_step.clear()

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.may_step.wait(TIMEOUT_S)
        result = super().run(plan)
        if self.is_rotten:
            worse = tuple(tuple(token_id + 1 for token_id in drawn) for drawn in result.token_ids)
            result = StepResult(step_id=plan.step_id, token_ids=worse)
        return result


class Broken(PseudoRunner):
    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)

    def run(self, plan: StepPlan) -> StepResult:
        raise ReplicaError("a rank was lost")


class Asked:
    """An engine with a canary, and what it was found guilty of."""

    def __init__(self, runner: PseudoRunner | None = None, every_s: float = 3600, **scheduler: object) -> None:
        self.runner = runner or Rotting()
        settings = {"max_model_len": 200, "prefix_caching": True, **scheduler}
        self.engine = Engine(make_scheduler(**settings), self.runner, idle_s=0.05)
        self.wrongs: list[HoldfastError] = []
        info = SimpleNamespace(vocab_size=1000, max_model_len=200, num_blocks=64, block_size=BLOCK_SIZE)
        self.canary = Canary(self.engine, info, self.wrongs.append, every_s=every_s)
        self.engine.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Each look waits for the end of a step."""
        for _ in range(100_000):
            if condition():
                return
            self.engine.stats(TIMEOUT_S)
        raise AssertionError("it never happened")

    def until_answered(self) -> None:
        self.until(lambda: self.canary._open is None)


@pytest.fixture
def asked() -> Iterator[Asked]:
    asked = Asked()
    assert len(asked.canary.begin()) == 4
    yield asked
    asked.runner.may_step.set()
    asked.engine.stop()


def test_it_is_computed_each_time_and_is_small(asked):
    for _ in range(3):
        assert asked.canary.ask()
        asked.until_answered()
    assert asked.canary.num_right == 3
    stats = asked.engine.stats()
    assert stats.num_prefix_hit_tokens == 0, "an answer out of the cache would say nothing"
    assert stats.num_tokens_computed == 4 * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1)
    assert stats.num_used_blocks == 0


def test_a_wrong_answer_says_where(asked):
    asked.runner.is_rotten = True
    asked.canary.ask()
    asked.until_answered()
    (wrong,) = asked.wrongs
    assert isinstance(wrong, ReplicaError)
    assert "self-check wrongly: " in str(wrong)
    assert asked.canary.num_right == 0


def test_an_open_question_is_not_asked_twice(asked):
    asked.runner.hold()
    assert asked.canary.ask()
    assert not asked.canary.ask()
    asked.runner.may_step.set()
    asked.until_answered()
    assert asked.canary.ask()


def test_users_go_first_and_the_question_gets_its_turn():
    """One at a time, with a line of others: aging brings it to the front of them."""
    asked = Asked(max_num_seqs=1, aging_s=0.001)
    asked.canary.begin()
    listener = Listener()
    asked.engine.attach(listener)
    for number in range(300):
        asked.engine.submit(make_request(f"r{number}", max_tokens=30), listener)
    asked.canary.ask()
    asked.until(lambda: asked.canary.num_right == 1)
    assert asked.engine.load.num_waiting > 0
    asked.engine.stop()


def test_a_refusal_is_no_wrong_answer():
    asked = Asked(max_num_seqs=1, max_num_waiting=1)
    asked.canary.begin()
    listener = Listener()
    asked.engine.attach(listener)
    asked.runner.hold()
    asked.engine.submit(make_request("runs"), listener)
    assert asked.runner.entered.wait(TIMEOUT_S)
    asked.engine.submit(make_request("waits"), listener)
    asked.canary.ask()
    asked.runner.may_step.set()
    asked.until_answered()
    assert (asked.wrongs, asked.canary.num_right) == ([], 0)
    asked.canary.ask()
    asked.until_answered()
    assert (asked.wrongs, asked.canary.num_right) == ([], 1)
    asked.engine.stop()


def test_an_abort_at_the_end_is_no_wrong_answer(asked):
    asked.runner.hold()
    asked.canary.ask()
    assert asked.runner.entered.wait(TIMEOUT_S)
    stopping = threading.Thread(target=asked.engine.stop)
    stopping.start()
    asked.runner.may_step.set()
    stopping.join(TIMEOUT_S)
    assert asked.wrongs == []
    with pytest.raises(ReplicaError):
        asked.canary.ask()


def test_a_question_that_does_not_fit_is_not_asked():
    asked = Asked(num_blocks=1)
    assert asked.canary.begin() == b""
    asked.engine.stop()


def test_an_engine_that_ends_before_the_first_answer_says_why():
    asked = Asked(Broken())
    with pytest.raises(ReplicaError, match="a rank was lost"):
        asked.canary.begin()
    asked.engine.stop()


def test_once_started_it_asks_by_itself_until_it_is_stopped():
    asked = Asked(every_s=0.001)
    asked.canary.begin()
    asked.canary.start()
    asked.until(lambda: asked.canary.num_right >= 3)
    asked.canary.stop()
    asked.canary._thread.join(TIMEOUT_S)
    assert asked.canary._thread.daemon
    assert not asked.canary._thread.is_alive()
    asked.engine.stop()


def test_it_stops_asking_an_engine_that_has_ended():
    asked = Asked(every_s=0.001)
    asked.canary.begin()
    asked.canary.start()
    asked.engine.stop()
    asked.canary._thread.join(TIMEOUT_S)
    assert not asked.canary._thread.is_alive()


# --- a real model: the same bits in any company, and others once something has changed ---

VARIANTS = {
    "strangers": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "preemption": {"cache": {"num_blocks": 60}},
    "larger blocks": {"cache": {"num_blocks": 80, "block_size": 16}},
    "ngram": {"speculation": {"speculative": "ngram"}},
    "suffix": {"speculation": {"speculative": "suffix"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def config_of(folder, size: int = 1, health: HealthConfig = SELDOM, **variant: dict[str, object]) -> WorkerConfig:
    scheduler = {"max_num_batched_tokens": 256, "max_num_seqs": 12, "aging_s": 0.05, **variant.get("scheduler", {})}
    return WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu"),
        parallel=ParallelConfig(tensor_parallel_size=size, num_threads=1),
        cache=CacheConfig(**{"block_size": 4, "num_blocks": 400, **variant.get("cache", {})}),
        scheduler=SchedulerConfig(**scheduler),
        speculation=SpeculationConfig(**variant.get("speculation", {})),
        health=health,
    )


def strangers() -> Iterator[EngineRequest]:
    rng = random.Random(3)
    for number in range(30):
        prompt = [rng.randrange(3, 100) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=number, max_tokens=60, ignore_eos=True)
        yield EngineRequest(request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling_params=params)


def ask_under_load(replica: Replica, num_times: int) -> None:
    """Asks so many times while others run, and waits for the answers. They are still running then."""
    listener, canary = Listener(), replica._canary
    replica.engine.attach(listener)
    for request in strangers():
        replica.engine.submit(request, listener)
    for number in range(num_times):
        assert canary.ask()
        while canary.num_right <= number and replica.engine.failure is None:
            replica.engine.stats(TIMEOUT_S)
    assert replica.engine.failure is None
    assert replica.engine.load.num_running > 0


@pytest.mark.parametrize("size", [1, 2], ids=["tp1", "tp2"])
def test_a_healthy_replica_gives_the_same_bits_in_any_company(folder, size):
    """And so does every other one, whatever its settings: the digests are equal."""
    digests = set()
    for name in VARIANTS if size == 1 else ("strangers", "preemption"):
        replica = Replica.start(config_of(folder, size, **VARIANTS[name]))
        ask_under_load(replica, 2 if size == 1 else 1)
        digests.add(replica.info.answers_digest)
        assert name != "preemption" or replica.engine.stats().num_preemptions > 0
        replica.stop()
    assert len(digests) == 1


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    tensor.detach().view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1 << bit)


def flip_a_norm(runner: ModelRunner) -> None:
    flip(runner._model._module.model.layers[1].input_layernorm.weight, 5, 12)


def flip_the_last_norm(runner: ModelRunner) -> None:
    flip(runner._model._module.model.norm.weight, 0, 20)


def spoil_a_kernel(runner: ModelRunner) -> None:
    """One of the output features comes out a little off, in one row of a hundred."""
    linear = next(module for module in runner._model._module.modules() if isinstance(module, Linear))
    kernel = linear._kernel

    def spoiled(rows: torch.Tensor) -> torch.Tensor:
        return kernel(rows) * torch.ones(rows.shape[-2], 1).index_fill(0, torch.tensor([rows.shape[-2] // 2]), 1.0001)

    linear._kernel = spoiled


def assert_found(replica: Replica, spoil: Callable[[], None]) -> None:
    """It answers rightly, is spoiled, and is lost at the next question."""
    listener, heard = Listener(), threading.Event()
    replica.on_failure(lambda error: heard.set())
    ask_under_load(replica, 1)
    replica.engine.attach(listener)
    spoil()
    replica._canary.ask()
    assert listener.failed.wait(TIMEOUT_S)
    assert heard.wait(TIMEOUT_S)
    assert "answered its self-check wrongly: " in str(listener.error)
    assert replica.engine.failure is listener.error
    assert replica._canary._stopped.is_set()
    replica.stop()


@pytest.mark.parametrize("spoil", [flip_a_norm, flip_the_last_norm, spoil_a_kernel])
def test_a_replica_whose_weights_or_kernels_go_wrong_is_lost_at_the_next_question(folder, spoil):
    config, group = config_of(folder), SingleRank()
    runner = ModelRunner.load(config, group, device=torch.device("cpu"))
    assert_found(Replica.around(config, runner, group), lambda: spoil(runner))


def test_a_flipped_bit_on_a_rank_that_is_not_the_leader_is_found_as_well(folder):
    config = config_of(folder, size=2)
    runners: dict[int, ModelRunner] = {}

    def run(group) -> None:
        runner = runners[group.rank] = ModelRunner.load(config, group, device=torch.device("cpu"))
        if group.rank > 0:
            return follow(runner, group)
        return assert_found(Replica.around(config, runner, group), lambda: flip_a_norm(runners[1]))

    run_ranks(2, run)


def test_other_weights_have_another_digest(folder, tmp_path):
    digests = set()
    for path in (folder, save_tiny_model("llama", tmp_path, seed=1)):
        replica = Replica.start(config_of(path))
        digests.add(replica.info.answers_digest)
        replica.stop()
    assert len(digests) == 2


@pytest.mark.parametrize("why", ["turned off", "rows are not invariant"])
def test_where_there_is_nothing_to_compare_nothing_is_asked(folder, why):
    health = HealthConfig(self_check_every_s=0) if why == "turned off" else SELDOM
    config, group = config_of(folder, health=health), SingleRank()
    runner = ModelRunner.load(config, group, device=torch.device("cpu"))
    if why != "turned off":
        runner.info = replace(runner.info, row_invariant=False)
    replica = Replica.around(config, runner, group)
    assert replica.info.answers_digest == b""
    assert replica.engine.stats().num_requests == 0
    replica.stop()
