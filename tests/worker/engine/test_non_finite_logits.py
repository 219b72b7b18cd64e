"""Non-finite logits: whose request fails, which requests go on, and when the replica has to end."""

import math
from ctypes import c_float, sizeof
from dataclasses import replace

import pytest
import torch

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.draws import DrawParams
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.engine.steps_in_flight import step_result
from holdfast.worker.errors import InternalError, ReplicaError
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.draft_model import DraftModel
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.step_plan import NO_TOKEN, ScheduledSequence, StepPlan, StepResult
from tests.draw_params import draw_params
from tests.parity.families import save_tiny_model
from tests.parity.harness import Sequences, worker_config
from tests.reference.sampler import broken_rows
from tests.reference.step_sampler import TorchSampler
from tests.worker.schedulers import make_request, make_scheduler

NAN, INF = math.nan, math.inf
VOCAB_SIZE = 300


# --- rows ---


def plan_of(*draws: DrawParams) -> StepPlan:
    shares = [
        ScheduledSequence(sequence_id=n, first_position=0, token_ids=(1,), block_ids=(n,), draw=draw, num_draws=1)
        for n, draw in enumerate(draws)
    ]
    return StepPlan(step_id=1, others=tuple(shares))


def test_rows_with_a_nan_or_an_infinite_best_are_found_and_banned_tokens_are_none():
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[0, 299] = NAN
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3, :299] = -INF
    assert broken_rows(logits) == [0, 1, 2]
    assert broken_rows(logits[:0]) == []


@pytest.fixture(params=["torch", "native"])
def sampler(request):
    sampler = TorchSampler() if request.param == "torch" else OwnPoolSampler.with_threads(2)
    yield sampler
    sampler.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "noisy"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_no_numbers_draws_nothing_and_leaves_the_others_as_they_are(temperature, bad, sampler):
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    draw = draw_params(seed=5, first_output_index=0, temperature=temperature, top_k=4, top_p=0.9, num_logprobs=2)
    right = step_result(plan_of(draw, draw, draw), HeadOutput(logits, None), sampler)
    broken = logits.clone()
    broken[1] = bad
    result = step_result(plan_of(draw, draw, draw), HeadOutput(broken, None), sampler)
    assert result.token_ids == (right.token_ids[0], (NO_TOKEN,), right.token_ids[2])
    assert (result.logprobs[0], result.logprobs[2]) == (right.logprobs[0], right.logprobs[2])


class OverflowingDraft:
    """A draft model's backend whose second row is not finite, and whose head has more tokens than the large model."""

    def __init__(self, sampler) -> None:
        self.sampler = sampler

    def run(self, batch, *, with_logits):
        logits = torch.zeros(3, VOCAB_SIZE)
        logits[:, 7], logits[:, VOCAB_SIZE - 1], logits[1, 0] = 1.0, 2.0, NAN
        return HeadOutput(logits, None)


def test_a_draft_model_that_overflows_guesses_some_token_of_the_large_model(sampler):
    draft = DraftModel(
        OverflowingDraft(sampler),
        torch.device("cpu"),
        vocab_size=VOCAB_SIZE - 1,
        draft_vocab_size=VOCAB_SIZE,
        max_len=9,
    )
    greedy = draw_params(seed=5, first_output_index=0, temperature=0.0)
    assert draft._draw(plan_of(greedy, greedy, greedy)) == [7, 0, 7]


@pytest.mark.parametrize("executor", ["native", "hf"])
def test_a_model_that_overflows_at_one_token_fails_one_request_and_leaves_no_trace(executor, tmp_path):
    """Of a real model: the neighbour's tokens are those without it, and so are those of whoever gets its blocks."""
    folder = save_tiny_model("llama", tmp_path / "tiny-llama")
    runner = ModelRunner.load(worker_config(folder, executor=executor), SingleRank(), device=torch.device("cpu"))
    leader = LeaderRunner(runner, SingleRank())
    clean, poisoned = [5, 9, 77, 31, 8, 64, 3], [100, 4, 99, 90, 7]
    right = first_tokens(leader, [clean, [6, 6, 6]])
    poison(runner, 99)
    assert first_tokens(leader, [clean, poisoned]) == [right[0], (NO_TOKEN,)]
    assert first_tokens(leader, [clean, [6, 6, 6]]) == right, "the second has the blocks of the one that failed"


def poison(runner: ModelRunner, token_id: int) -> None:
    """The token's embedding is not finite from now on."""
    backend = runner.backend
    if isinstance(backend, HfBackend):
        with torch.no_grad():
            backend.model.module.get_input_embeddings().weight[token_id] = NAN
    else:
        model = backend.executor.packed.model
        row = (c_float * model.hidden).from_address(model.embedding + token_id * model.hidden * sizeof(c_float))
        row[:] = [NAN] * model.hidden


def first_tokens(leader: LeaderRunner, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    sequences = Sequences(leader, prompts)
    shares = tuple(sequences.scheduled(n, 0, len(prompt), 1) for n, prompt in enumerate(prompts))
    return list(leader.run(StepPlan(step_id=1, others=shares)).token_ids)


# --- requests ---


class Listener:
    """One to whom the tests tell things themselves."""


class Step:
    """A core whose model has non-finite logits for sequences of the test's choice."""

    def __init__(self, **scheduler) -> None:
        self.core = EngineCore(make_scheduler(**scheduler))
        self.listener = Listener()
        self.core.attach(self.listener)
        self.core.take_updates()

    def submit(self, *requests) -> None:
        for request in requests:
            self.core.submit(request, self.listener, 0.0)

    def run(self, *broken: int):
        """One step; `broken` are the sequences, counted from 0 in the order of submission, that draw nothing."""
        plan = self.core.scheduler.plan(0.0)
        drawn = [
            (NO_TOKEN if sequence.sequence_id in broken else 7,) * sequence.num_draws for sequence in plan.sequences
        ]
        self.core.commit(plan, StepResult(step_id=plan.step_id, token_ids=tuple(drawn)), 0.1)
        update = dict(self.core.take_updates())[self.listener]
        self.core.check_integrity()
        return update


def test_a_request_whose_logits_are_no_numbers_fails_and_its_neighbours_go_on():
    step = Step()
    step.submit(make_request("fine"), make_request("broken"))
    step.run()
    update = step.run(1)
    assert [delta.attempt for delta in update.deltas] == ["fine"]
    (rejection,) = update.rejections
    assert (rejection.attempt, type(rejection.error)) == ("broken", InternalError)
    assert "not finite" in str(rejection.error)
    assert step.run().load.num_running == 1


def test_nobody_begins_with_what_a_failed_request_has_computed():
    step = Step(prefix_caching=True)
    step.submit(make_request("fine", prompt=(1, 2, 3)), make_request("broken", prompt_len=16))
    step.run(1)
    step.submit(make_request("next", prompt_len=16))
    step.run()
    assert step.core.scheduler.stats().num_prefix_hit_tokens == 0


def test_a_prefix_that_was_found_and_came_to_no_numbers_is_forgotten():
    step = Step(prefix_caching=True)
    step.submit(make_request("first", prompt_len=16, max_tokens=1))
    step.run()
    step.submit(make_request("fine", prompt=(1, 2, 3)), make_request("broken", prompt_len=16))
    step.run(2)
    num_found = step.core.scheduler.stats().num_prefix_hit_tokens
    assert num_found > 0
    step.submit(make_request("next", prompt_len=16))
    step.run()
    assert step.core.scheduler.stats().num_prefix_hit_tokens == num_found


def test_what_comes_after_a_wrong_draft_breaks_nothing():
    step = Step(speculation=Guesses())
    step.submit(make_request("r"))
    step.run()
    plan = step.core.scheduler.plan(0.0)
    (sequence,) = plan.sequences
    assert sequence.num_draws == 3
    step.core.commit(plan, StepResult(step_id=plan.step_id, token_ids=((7, NO_TOKEN, NO_TOKEN),)), 0.1)
    update = dict(step.core.take_updates())[step.listener]
    assert [delta.token_ids for delta in update.deltas] == [(7,)]
    assert not update.rejections


class Guesses:
    """Proposes what is never drawn."""

    def propose(self, sequence, num_tokens: int) -> tuple[int, ...]:
        return (8, 8)[:num_tokens]

    def forget(self, sequence) -> None:
        pass


# --- the replica ---


def test_a_replica_that_has_numbers_for_nobody_ends():
    step = Step()
    step.submit(make_request("a"), make_request("b"))
    with pytest.raises(ReplicaError, match=r"not finite .* for any of 2 requests"):
        step.run(0, 1)


def test_the_completions_of_one_request_are_one():
    step = Step()
    step.submit(*(replace(make_request(f"r#{n}"), group_id="r") for n in range(3)))
    rejections = [item for n in range(3) for item in step.run(n).rejections]  # each computes the prompt anew
    assert [type(item.error) for item in rejections] == [InternalError] * 3


def test_three_requests_in_a_row_that_fail_alone_end_the_replica():
    step = Step()
    for number in range(2):
        step.submit(make_request(f"r{number}"))
        assert len(step.run(number).rejections) == 1
    step.submit(make_request("r2"))
    with pytest.raises(ReplicaError, match="3 requests"):
        step.run(2)


def test_a_token_in_between_shows_that_the_replica_is_well():
    step = Step()
    for number in range(0, 20, 2):
        step.submit(make_request(f"r{number}"))
        assert len(step.run(number).rejections) == 1
        step.submit(make_request(f"r{number + 1}", max_tokens=1))
        assert len(step.run().deltas) == 1


# --- whom to ask ---


class Check(Listener):
    """Knows an answer, or does not."""

    def __init__(self, *, knows: bool = True) -> None:
        self.knows, self.num_asked = knows, 0

    def ask_in_doubt(self) -> bool:
        self.num_asked += 1
        return self.knows


def doubted(**options) -> tuple[Step, Check]:
    step, check = Step(), Check(**options)
    step.core.attach(check)
    step.core.numbers_check = check
    return step, check


def test_requests_of_clients_alone_end_no_replica_that_knows_its_answer():
    step, check = doubted()
    step.submit(make_request("a"), make_request("b"))
    update = step.run(0, 1)
    assert (update.rejections, check.num_asked) == ((), 1), "they wait for what the check says"
    step.core.settle()
    update = dict(step.core.take_updates())[step.listener]
    assert [(item.attempt, type(item.error)) for item in update.rejections] == [
        ("a", InternalError),
        ("b", InternalError),
    ]
    step.core.check_integrity()
    step.submit(make_request("c"))
    assert len(step.run(2).rejections) == 1, "what was before proves nothing any more"
    assert check.num_asked == 1


def test_without_an_answer_the_replica_ends_as_before():
    step, check = doubted(knows=False)
    step.submit(make_request("a"), make_request("b"))
    with pytest.raises(ReplicaError, match="2 requests"):
        step.run(0, 1)
    assert check.num_asked == 1


def test_a_question_that_has_no_numbers_itself_is_told_at_once():
    step, check = doubted()
    step.submit(make_request("a"))
    step.core.submit(make_request("question"), check, 0.0)
    plan = step.core.scheduler.plan(0.0)
    result = StepResult(step_id=plan.step_id, token_ids=((NO_TOKEN,), (NO_TOKEN,)))
    step.core.commit(plan, result, 0.1)
    updates = dict(step.core.take_updates())
    assert [item.attempt for item in updates[check].rejections] == ["question"]
    assert updates[step.listener].rejections == ()


def test_a_client_that_leaves_in_doubt_is_answered():
    step, _ = doubted()
    step.submit(make_request("a"), make_request("b"))
    step.run(0, 1)
    step.core.abort("a")
    assert [item.attempt for item in dict(step.core.take_updates())[step.listener].rejections] == ["a"]
    step.core.detach(step.listener)
    step.core.check_integrity()
    step.core.settle()
    assert not step.core._owners
