"""The one idea, in one test: random mixtures of all parameters give the same tokens, log-probabilities and endings
alone and in a batch of strangers, out of the prefix cache, in chunks, preempted, with two plans in flight, and with
every kind of drafts, on one rank and on two, as a native backend and on the HF backend.

Requests are made for the bundled model, whose tokenizer grammars need.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import bad_word_token_ids
from holdfast.worker.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from holdfast.worker.errors import HoldfastError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest, FinishReason, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler import planned_step
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepPlan
from holdfast.worker.step_update import StepUpdate

NUM_REQUESTS = 40
TIMEOUT_S = 240
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
BLOCK_SIZE = 16
NUM_TOKENS = 6400
"""What the cache holds, where a variant does not say less."""

VARIANTS = {
    "strangers": {},
    "prefix cache": {"cache": {"enable_prefix_caching": True}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "preemption": {"num_tokens": 288, "scheduler": {"max_num_seqs": 12}},
    "ngram": {"speculation": {"speculative": "ngram"}},
    "suffix": {"speculation": {"speculative": "suffix"}},
    "draft model": {"speculation": {"speculative": "draft"}},
    "all of it": {
        "num_tokens": 288,
        "cache": {"enable_prefix_caching": True},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 10},
        "speculation": {"speculative": "ngram"},
    },
}

ON_ONE_RANK = ("suffix", "draft model", "all of it")
"""Tried there every time: all of it is the other situations at once, but for these two ways to guess tokens."""

ON_THE_HF_BACKEND = ("all of it",)
"""Tried there every time. Ranks run the same steps as one would: all of two ranks is for a long search."""


@dataclass(slots=True)
class Outcome:
    """All that a caller could see of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None


class Listener:
    """Gathers outcomes until all have ended."""

    def __init__(self, num_requests: int) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._left = num_requests
        self._error: HoldfastError | None = None
        self._done = threading.Event()

    def on_update(self, update: StepUpdate) -> None:
        for rejection in update.rejections:
            self.on_failure(rejection.error)
        for delta in update.deltas:
            outcome = self.outcomes.setdefault(delta.attempt, Outcome())
            assert delta.first_token_index == len(outcome.token_ids)
            outcome.token_ids += delta.token_ids
            outcome.logprobs += delta.logprobs
            outcome.prompt_logprobs += delta.prompt_logprobs
            outcome.finish_reason = delta.finish_reason
            self._left -= delta.finish_reason is not None
        if not self._left:
            self._done.set()

    def on_failure(self, error: HoldfastError) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> dict[str, Outcome]:
        assert self._done.wait(TIMEOUT_S), f"{self._left} requests did not end in time"
        if self._error:
            raise self._error
        return self.outcomes


def run(replica: Replica, requests: list[EngineRequest]) -> dict[str, Outcome]:
    listener = Listener(len(requests))
    replica.engine.attach(listener)
    for request in requests:
        replica.engine.submit(request, listener)
    outcomes = listener.wait()
    replica.engine.detach(listener)
    return outcomes


def start(tensor_parallel_size: int, executor: str, variant: dict[str, Any]) -> Replica:
    num_blocks = variant.get("num_tokens", NUM_TOKENS) // BLOCK_SIZE
    cache = {"enable_prefix_caching": False, **variant.get("cache", {})}
    scheduler = {"max_num_batched_tokens": 2048, "max_num_seqs": 32, **variant.get("scheduler", {})}
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel_size, num_threads=1)
    speculation = SpeculationConfig(**variant.get("speculation", {}))
    config = WorkerConfig(
        model=ModelConfig(executor=executor),
        parallel=parallel,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, **cache),
        scheduler=SchedulerConfig(**scheduler),
        speculation=speculation,
    )
    return Replica.start(located(config))


# --- the requests ---

TEXTS = (
    "The capital of France is",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "one two one two one two one two one two one two one",
    "What is 12 plus 30? The answer is",
    "A list of colours: red, green, blue, red, green, blue, red,",
)
GRAMMARS = (
    {"regex": r"[a-z]{3,9}( [a-z]{2,5}){0,3}"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n"]}},
    {"choice": ["yes", "no", "perhaps it is"]},
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(located(WorkerConfig()).model.model)


@pytest.fixture(scope="module")
def requests(tokenizer) -> list[EngineRequest]:
    rng = random.Random(12)
    return [mixture(f"r{number}", rng, tokenizer) for number in range(NUM_REQUESTS)]


def mixture(request_id: str, rng: random.Random, tokenizer: Tokenizer) -> EngineRequest:
    """A request in which each parameter is used about every third time."""

    def now_and_then(**params: object) -> dict[str, object]:
        return params if rng.random() < 0.35 else {}

    structure = rng.choice(GRAMMARS) if rng.random() < 0.4 else None
    bad_words = ("the", "Paris") if rng.random() < 0.3 else ()
    max_tokens = rng.randint(2, 60)
    params = SamplingParams(
        seed=rng.randrange(2**63),
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 0.0, 0.6, 1.0, 1.4)),
        bad_words=bad_words,
        structured_outputs=structure,
        **now_and_then(top_k=rng.choice((1, 4, 40))),
        **now_and_then(top_p=rng.choice((0.3, 0.8, 0.97))),
        **now_and_then(min_p=rng.choice((0.01, 0.2))),
        **now_and_then(min_tokens=rng.randint(0, max_tokens)),
        **now_and_then(ignore_eos=True),
        **now_and_then(stop_token_ids=rng.sample(range(3, tokenizer.vocab_size), 40)),
        **now_and_then(repetition_penalty=rng.choice((0.7, 1.3, 2.0))),
        **now_and_then(presence_penalty=rng.choice((-1.0, 0.7))),
        **now_and_then(frequency_penalty=rng.choice((-0.5, 0.9))),
        **now_and_then(logit_bias={rng.randrange(tokenizer.vocab_size): rng.uniform(-9, 9) for _ in range(5)}),
        **now_and_then(allowed_token_ids=rng.sample(range(tokenizer.vocab_size), 300)),
        **now_and_then(logprobs=rng.choice((0, 3))),
        **now_and_then(prompt_logprobs=rng.choice((0, 2))),
    )
    prompt = tokenizer.encode(" ".join(rng.choices(TEXTS, k=rng.randint(1, 3))))
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=params,
        cache_salt=rng.choice(("", "", "tenant")),
        bad_word_token_ids=bad_word_token_ids(tokenizer, bad_words),
        grammar=GrammarCompiler(tokenizer).compile(params.structure),
    )


# --- the test ---


@dataclass(frozen=True)
class Alone:
    """Requests, and what became of each by itself on so many ranks."""

    model: tuple[int, str]
    """Ranks and executor."""
    requests: list[EngineRequest]
    outcomes: dict[str, Outcome]


@pytest.fixture(scope="module")
def run_alone(requests) -> Callable[[int, str, int], Alone]:
    """Each request by itself: its prompt in one piece, nothing cached, nobody beside it. Done once for each model."""

    @cache
    def run_so_many(num_ranks: int, executor: str, num_requests: int) -> Alone:
        replica, asked = start(num_ranks, executor, {}), requests[:num_requests]
        outcomes = {one.request_id: run(replica, [one])[one.request_id] for one in asked}
        replica.stop()
        return Alone((num_ranks, executor), asked, outcomes)

    return run_so_many


@pytest.fixture
def alone(request, run_alone) -> Alone:
    return run_alone(*request.param)


def test_the_mixture_is_a_mixture(requests):
    """Were it all one kind of request, the test below would show little."""
    params = [request.sampling_params for request in requests]
    for name in ("top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids", "presence_penalty", "logit_bias"):
        assert 3 < sum(bool(getattr(one, name)) for one in params) < NUM_REQUESTS - 3, name
    for name in ("logprobs", "prompt_logprobs", "allowed_token_ids", "structured_outputs"):
        assert 3 < sum(getattr(one, name) is not None for one in params) < NUM_REQUESTS - 3, name


FEW_REQUESTS = 14
MODELS = [
    pytest.param(
        (size, executor, count), id=f"tp{size}-{executor}" + "-all" * is_long, marks=[pytest.mark.slow] * is_long
    )
    for size, executor, count, is_long in (
        (1, "native", NUM_REQUESTS, False),
        (1, "hf", FEW_REQUESTS, False),
        (2, "native", FEW_REQUESTS, False),
        (2, "hf", FEW_REQUESTS, True),
        (2, "native", NUM_REQUESTS, True),
    )
]


def is_usual(size: int, executor: str, name: str) -> bool:
    if size > 1:  # every time in `test_serving.py`
        return False
    return name in (ON_THE_HF_BACKEND if executor == "hf" else ON_ONE_RANK)


CASES = [
    pytest.param(
        model.values[0],
        name,
        id=f"{model.id}-{name}",
        marks=model.marks if is_usual(*model.values[0][:2], name) else pytest.mark.slow,
    )
    for model in MODELS
    for name in VARIANTS
]


GOING_ON = [
    pytest.param(*model.values, id=model.id, marks=model.marks if model.values[0][0] == 1 else pytest.mark.slow)
    for model in MODELS
]
"""On two ranks a request is continued in `test_serving.py`, every time."""


@pytest.mark.parametrize(("alone", "name"), CASES, indirect=["alone"])
def test_a_request_comes_out_the_same_whatever_happens_around_it(alone, name, monkeypatch):
    num_ahead = count_plans_ahead(monkeypatch)
    replica = start(*alone.model, VARIANTS[name])
    shuffled = random.Random(name).sample(alone.requests, len(alone.requests))
    for order in (shuffled, shuffled[::-1]):
        assert_equal(run(replica, order), alone.outcomes)
    assert_scored_as_rolled_out(replica, shuffled, alone.outcomes)
    stats = replica.engine.stats()
    replica.stop()
    assert stats.num_used_blocks == 0
    if name != "two plans":  # the few requests of some models need none then
        assert (stats.num_preemptions > 0) == (name in ("preemption", "all of it"))
    assert (stats.num_prefix_hit_tokens > 0) == (name in ("prefix cache", "all of it"))
    assert (stats.num_accepted_tokens > 0) == ("speculation" in VARIANTS[name])
    assert (num_ahead() > 50) == (name == "two plans")


def count_plans_ahead(monkeypatch) -> Callable[[], int]:
    """How many steps are planned before the result of the one before them. Most of the mixture awaits results: here,
    what can go ahead does, however many are held up.
    """
    planned, plan_ahead = [], Scheduler.plan_ahead

    def counted(self: Scheduler, now: float) -> StepPlan | None:
        planned.append(plan_ahead(self, now))
        return planned[-1]

    monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", 1.0)
    monkeypatch.setattr(Scheduler, "plan_ahead", counted)
    return lambda: sum(plan is not None for plan in planned)


@pytest.mark.parametrize("alone", GOING_ON, indirect=True)
def test_a_request_goes_on_after_any_token_as_if_nothing_had_been(alone):
    """Continued on another replica at a token of chance, in a batch: what is left is what was left."""
    expected = alone.outcomes
    rng = random.Random(5)
    replica = start(*alone.model, VARIANTS["all of it"])
    cuts = {request_id: rng.randrange(len(expected[request_id].token_ids)) for request_id in expected}
    continued = [
        replace(request, output_token_ids=tuple(expected[request.request_id].token_ids[: cuts[request.request_id]]))
        for request in alone.requests
    ]
    listener = ContinuedListener(cuts)
    replica.engine.attach(listener)
    for request in continued:
        replica.engine.submit(request, listener)
    outcomes = listener.wait()
    replica.stop()
    rest = {
        key: Outcome(
            outcome.token_ids[cuts[key] :],
            outcome.logprobs[cuts[key] :],
            () if cuts[key] else outcome.prompt_logprobs,
            outcome.finish_reason,
        )
        for key, outcome in expected.items()
    }
    assert_equal(outcomes, rest)


def assert_scored_as_rolled_out(replica: Replica, requests: list[EngineRequest], outcomes: dict[str, Outcome]) -> None:
    """What a later call says of an output, as the end of its prompt, is what its tokens were drawn with: to the bit."""
    rolled_out = [one for one in requests if one.sampling_params.logprobs is not None]
    scored = run(replica, [scoring(one, outcomes[one.request_id].token_ids) for one in rolled_out])
    for one in rolled_out:
        outcome = outcomes[one.request_id]
        assert list(scored[one.request_id].prompt_logprobs[-len(outcome.token_ids) :]) == outcome.logprobs


def scoring(request: EngineRequest, token_ids: list[int]) -> EngineRequest:
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=request.sampling_params.logprobs)
    prompt = (*request.prompt_token_ids, *token_ids)
    return EngineRequest(request_id=request.request_id, prompt_token_ids=prompt, sampling_params=params)


class ContinuedListener(Listener):
    """Outputs begin where their request was cut."""

    def __init__(self, cuts: dict[str, int]) -> None:
        super().__init__(len(cuts))
        self._cuts = cuts

    def on_update(self, update: StepUpdate) -> None:
        shifted = [
            replace(delta, first_token_index=delta.first_token_index - self._cuts[delta.attempt])
            for delta in update.deltas
        ]
        super().on_update(replace(update, deltas=tuple(shifted)))


def assert_equal(outcomes: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    assert outcomes.keys() == expected.keys()
    for request_id, outcome in outcomes.items():
        assert outcome == expected[request_id], request_id
