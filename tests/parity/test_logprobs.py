"""Logprobs of served requests against a float64 log-softmax of Hugging Face's logits."""

import pytest
import torch

from tests.parity.harness import hugging_face, load, worker_config
from worker.config import SchedulerConfig
from worker.model_runner import LeaderRunner
from worker.request import EngineRequest, SamplingParams, TokenLogprob
from worker.scheduler import Scheduler

NUM_NEW = 12
WARM = SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.3, seed=3, max_tokens=NUM_NEW, logprobs=20)
GREEDY = SamplingParams(temperature=0.0, seed=4, max_tokens=NUM_NEW, logprobs=5)
SILENT = SamplingParams(seed=5, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def leader(tiny_model) -> LeaderRunner:
    return load(worker_config(tiny_model("llama")))


def served(leader: LeaderRunner, requests: list[EngineRequest]) -> dict[str, list[TokenLogprob]]:
    """All requests together, prompts in chunks of at most 16 tokens."""
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
    )
    said = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        for delta in scheduler.commit(plan, leader.run(plan)):
            said[delta.request_id] += delta.logprobs
    return said


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
            assert ours == pytest.approx([float(row[item.token_id]), *best.values.tolist()], abs=2e-5)
    assert max(item.rank for item in said["r0"]) > 1, "the warm request was meant to draw others than the best"
    assert said["r2"] == []


def test_they_have_the_same_bits_alone_and_in_a_batch(leader, prompts):
    requests = requests_of(prompts)
    together = served(leader, requests)
    for request in requests:
        assert served(leader, [request]) == {request.request_id: together[request.request_id]}
