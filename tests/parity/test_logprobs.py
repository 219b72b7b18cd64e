"""Logprobs of served requests, of outputs and of prompts, against a float64 log-softmax of Hugging Face's logits."""

from dataclasses import replace

import pytest
import torch

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.harness import hugging_face, load, logprobs_of, on_ranks, worker_config

NUM_NEW = 12
WARM = SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.3, seed=3, max_tokens=NUM_NEW, logprobs=20)
GREEDY = SamplingParams(temperature=0.0, seed=4, max_tokens=NUM_NEW, logprobs=5)
SILENT = SamplingParams(seed=5, max_tokens=NUM_NEW)
PROMPT_COUNTS = (20, 0, 5)


@pytest.fixture(scope="module")
def leader(tiny_model, executor) -> LeaderRunner:
    return load(worker_config(tiny_model("llama"), executor=executor))


def scheduler_of(leader: LeaderRunner, chunk: int, prefix_caching: bool) -> Scheduler:
    info = leader._runner.info
    return Scheduler(
        SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8),
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        prefix_caching=prefix_caching,
    )


def served(leader: LeaderRunner, requests: list[EngineRequest]) -> dict[str, list[TokenLogprob]]:
    """All requests together, prompts in chunks of at most 16 tokens."""
    scheduler = scheduler_of(leader, chunk=16, prefix_caching=True)
    return logprobs_of(scheduler, leader, requests)


def requests_of(prompts: list[list[int]]) -> list[EngineRequest]:
    return [
        EngineRequest(request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling_params=params)
        for number, (prompt, params) in enumerate(zip(prompts, (WARM, GREEDY, SILENT), strict=True))
    ]


def test_they_are_those_of_hugging_face(leader, tiny_model, prompts):
    said = served(leader, requests_of(prompts))
    model = hugging_face(tiny_model("llama"))
    for number, count in ((0, 20), (1, 5)):
        prompt, items = prompts[number], said[f"r{number}"]
        tokens = [*prompt, *(item.token_id for item in items)]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1)
        assert len(items) == NUM_NEW
        for item, row in zip(items, expected, strict=True):
            best = row.topk(count)
            assert item.rank == int((row > row[item.token_id]).sum()) + 1
            assert [token_id for token_id, _ in item.top] == best.indices.tolist()
            ours = [item.logprob, *(logprob for _, logprob in item.top)]
            assert ours == pytest.approx([float(row[item.token_id]), *best.values.tolist()], abs=1e-5)
    assert max(item.rank for item in said["r0"]) > 1, "the warm request was meant to draw others than the best"
    assert said["r2"] == []


def test_they_have_the_same_bits_alone_and_in_a_batch(leader, prompts):
    requests = requests_of(prompts)
    together = served(leader, requests)
    for request in requests:
        assert served(leader, [request]) == {request.request_id: together[request.request_id]}


# --- Of prompts ---


def prompt_logprob_requests(prompts: list[list[int]]) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(seed=1, max_tokens=3, prompt_logprobs=count),
        )
        for number, (prompt, count) in enumerate(zip(prompts, PROMPT_COUNTS, strict=True))
    ]


def rated_by(
    scheduler: Scheduler, leader: LeaderRunner, requests: list[EngineRequest]
) -> dict[str, list[TokenLogprob]]:
    """What requests that run together are told of their prompts."""
    heard = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        for delta in scheduler.commit(plan, leader.run(plan)):
            heard[delta.attempt] += delta.prompt_logprobs
    return heard


def told_by(leader: LeaderRunner, requests: list[EngineRequest], chunk: int) -> dict[str, list[TokenLogprob]]:
    """As `rated_by`, in steps of so many tokens in all."""
    return rated_by(scheduler_of(leader, chunk, prefix_caching=False), leader, requests)


def check_against_hugging_face(message: list[TokenLogprob], prompt: list[int], count: int, model) -> None:
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    for token_id, item, row in zip(prompt[1:], message, expected[:-1], strict=True):
        best = row.topk(count)
        assert item.token_id == token_id
        assert item.rank == int((row > row[token_id]).sum()) + 1
        assert [best_id for best_id, _ in item.top] == best.indices.tolist()
        ours = [item.logprob, *(logprob for _, logprob in item.top)]
        assert ours == pytest.approx([float(row[token_id]), *best.values.tolist()], abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_those_of_prompts_are_those_of_hugging_face(tiny_model, prompts, family, executor):
    leader = load(worker_config(tiny_model(family), executor=executor))
    message = told_by(leader, prompt_logprob_requests(prompts), chunk=256)
    model = hugging_face(tiny_model(family))
    for number, (prompt, count) in enumerate(zip(prompts, PROMPT_COUNTS, strict=True)):
        check_against_hugging_face(message[f"r{number}"], prompt, count, model)


@pytest.mark.parametrize("chunk", [16, 7, 3])
def test_a_prompt_has_the_same_bits_whole_in_chunks_and_among_strangers(leader, prompts, chunk):
    requests = prompt_logprob_requests(prompts)
    together = told_by(leader, requests, chunk)
    for request in requests:
        assert told_by(leader, [request], chunk=256) == {request.request_id: together[request.request_id]}


def test_a_prompt_that_is_in_the_cache_is_rated_all_the_same(leader, prompts):
    first, second = (replace(prompt_logprob_requests(prompts)[0], request_id=name) for name in ("first", "second"))
    scheduler = scheduler_of(leader, chunk=32, prefix_caching=True)
    message = rated_by(scheduler, leader, [first])["first"]
    assert rated_by(scheduler, leader, [second])["second"] == message
    assert scheduler.stats().num_prefix_hit_tokens == 0


def test_ranks_that_share_a_model_rate_as_hugging_face_does(tiny_model, prompts):
    config = worker_config(tiny_model("llama"), 2)
    whole, chunked = on_ranks(
        config, lambda leader: [told_by(leader, prompt_logprob_requests(prompts), chunk) for chunk in (256, 7)]
    )
    assert whole == chunked
    model = hugging_face(tiny_model("llama"))
    for number, (prompt, count) in enumerate(zip(prompts, PROMPT_COUNTS, strict=True)):
        check_against_hugging_face(whole[f"r{number}"], prompt, count, model)
