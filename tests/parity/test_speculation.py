"""Tokens and logprobs with every kind of draft are those without, bit for bit, in mixtures of all parameters.

Each request is run alone without drafts first. Then all run together, in chunks, with a prefix cache and too little
memory, with drafts that are right, wrong, random, looked up, remembered or made by a second model.
"""

import random

import pytest

from holdfast.worker.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.draft_model import check_same_tokens
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from tests.parity.test_serving import Collector

NUM_NEW = 24
SCARCE = CacheConfig(block_size=16, num_blocks=6)
CROWDED = SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=8)


def make_requests(num_requests: int = 14, seed: int = 0) -> list[EngineRequest]:
    """Prompts that begin alike or repeat themselves, and any parameters together."""
    rng = random.Random(seed)
    document = [rng.randrange(3, 126) for _ in range(30)]
    requests = []
    for number in range(num_requests):
        pattern = [rng.randrange(3, 126) for _ in range(rng.randint(1, 4))]
        prompt = document[: rng.choice([0, 9, 30])] + pattern * rng.randint(1, 6)
        max_tokens = rng.choice([NUM_NEW, NUM_NEW, 1, 7])
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=number,
            temperature=rng.choice([0.0, 0.0, 0.3, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            min_tokens=min(max_tokens, rng.choice([0, 0, 5])),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
            logit_bias=rng.choice([{}, {5: 4.0, 9: -3.0}]),
            stop_token_ids=rng.sample(range(3, 126), rng.choice([0, 0, 20])),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 3]),
        )
        bad_words = ((7,), (8, 9)) if number % 4 == 0 else ()
        requests.append(
            EngineRequest(
                request_id=f"r{number}",
                prompt_token_ids=tuple(prompt),
                sampling_params=params,
                bad_word_token_ids=bad_words,
            )
        )
    return requests


def config_of(folder, speculation=None, size=1, executor="native") -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model=str(folder), dtype="float32", device="cpu", executor=executor),
        parallel=ParallelConfig(tensor_parallel_size=size, num_threads=1),
        cache=SCARCE,
        scheduler=CROWDED,
        speculation=speculation or SpeculationConfig(),
    )


def load(config: WorkerConfig) -> LeaderRunner:
    group = SingleRank()
    return LeaderRunner(ModelRunner.load(config, group), group)


def serve(leader, requests, speculation=None, scheduler_config=CROWDED):
    """What each request was told, (token, logprob) by (token, logprob), and the scheduler's counts."""
    info = leader._runner.info
    scheduler = Scheduler(
        scheduler_config,
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        drafter=speculation,
    )
    said = {request.request_id: ([], []) for request in requests}
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.commit(plan, leader.run(plan)):
            tokens, logprobs = said[delta.attempt]
            tokens += delta.token_ids
            logprobs += delta.logprobs
    scheduler.check_integrity()
    return said, scheduler.stats()


@pytest.fixture(scope="module")
def leader(tiny_model, executor):
    """With a draft model that is the model itself, so that most of its guesses are right."""
    draft = SpeculationConfig(speculative="draft", draft_model=str(tiny_model("llama")))
    return load(config_of(tiny_model("llama"), draft, executor=executor))


@pytest.fixture(scope="module")
def alone(leader):
    """Requests, and what each is told when it runs alone, without drafts and without chunks."""
    requests = make_requests()
    heard = {}
    for request in requests:
        heard |= serve(leader, [request], scheduler_config=SchedulerConfig())[0]
    return requests, heard


class Scripted:
    """A proposer that knows what requests were told, and says so, or something else."""

    def __init__(self, message, kind):
        self._told, self._kind, self._rng = message, kind, random.Random(5)

    def propose(self, sequence, num_tokens):
        tokens = self._told[sequence.request.request_id][0]
        future = tokens[sequence.num_output_tokens :][:num_tokens]
        if self._kind == "adversarial":  # nearly right, where it does most harm
            return (*future[:-1], (future[-1] + 1) % 126) if future else (3,)
        if self._kind == "random":
            return tuple(self._rng.choice([token_id, self._rng.randrange(126)]) for token_id in future)
        return tuple(future)

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("kind", ["perfect", "adversarial", "random", "ngram", "suffix", "draft"])
def test_tokens_and_logprobs_are_those_without_drafts(leader, alone, kind):
    requests, message = alone
    method = kind if kind in ("ngram", "suffix", "draft") else "ngram"
    scripted = None if method == kind else Scripted(message, kind)
    config = SpeculationConfig(speculative=method, num_speculative_tokens=5)
    said, stats = serve(leader, requests, Speculation(config, CROWDED, scripted))
    assert said == message
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 10
    assert stats.num_accepted_tokens > 0


def test_a_draft_model_that_is_the_model_is_always_right(leader):
    """The same noise on both sides: tokens that are drawn by chance are guessed too."""
    params = {"temperature": 1.5, "max_tokens": NUM_NEW, "ignore_eos": True, "repetition_penalty": 1.2}
    requests = [
        EngineRequest(request_id=f"r{i}", prompt_token_ids=(3 + i, 4), sampling_params=SamplingParams(seed=i, **params))
        for i in range(3)
    ]
    speculation = Speculation(SpeculationConfig(speculative="draft"), SchedulerConfig())
    _, stats = serve(leader, requests, speculation, SchedulerConfig())
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30


@pytest.mark.slow  # every time, as a part of test_mixture.py
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_two_ranks_say_the_same_with_and_without(tiny_model, kind):
    requests = make_requests(6, seed=1)
    heard = []
    for method in ("none", kind):
        speculation = SpeculationConfig(speculative=method, draft_model=str(tiny_model("llama")))
        replica = Replica.start(config_of(tiny_model("llama"), speculation, size=2))
        try:
            collector = Collector(len(requests))
            replica.engine.attach(collector)
            for request in requests:
                replica.engine.submit(request, collector)
            heard.append(collector.wait())
            stats = replica.engine.stats()
        finally:
            replica.stop()
    assert heard[0] == heard[1]
    assert stats.num_accepted_tokens > 0


def test_another_model_may_draft_with_its_own_shape(tiny_model, alone, executor):
    """Another family, with weights of its own, is wrong nearly always; the tokens are the same."""
    draft = SpeculationConfig(speculative="draft", draft_model=str(tiny_model("qwen2")))
    leader = load(config_of(tiny_model("llama"), draft, executor=executor))
    said, stats = serve(leader, alone[0], Speculation(draft, CROWDED))
    assert said == alone[1]
    assert stats.num_draft_tokens > 0


def test_a_draft_model_of_other_tokens_is_refused_by_name(tmp_path):
    for name, vocab in (("ours", {"a": 0, "b": 1}), ("theirs", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(
            f'{{"model": {{"vocab": {str(vocab).replace(chr(39), chr(34))}}}, "added_tokens": []}}'
        )
    check_same_tokens(tmp_path / "ours", tmp_path / "ours")
    with pytest.raises(ConfigurationError, match=r"speculation\.draft_model = .*theirs"):
        check_same_tokens(tmp_path / "ours", tmp_path / "theirs")


def test_a_model_without_a_draft_model_says_so(tiny_model):
    with pytest.raises(ConfigurationError, match=r"speculation\.draft_model"):
        load(config_of(tiny_model("llama"), SpeculationConfig(speculative="draft")))
