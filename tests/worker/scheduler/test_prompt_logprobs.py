"""Logprobs of prompt tokens through the scheduler: each is told once, whatever became of the steps that they took."""

import pytest
import torch

from holdfast.worker.engine.steps_in_flight import step_result
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.request import EngineRequest, TokenDelta, TokenLogprob
from holdfast.worker.scheduler import prompt_outputs as prompt_logprobs
from holdfast.worker.step_plan import StepPlan, StepResult
from tests.draw_params import draw_params
from tests.pseudo_model import pseudo_token
from tests.reference.logprobs import token_logprobs
from tests.reference.step_sampler import TorchSampler
from tests.worker.scheduler.test_logits_settings import VOCAB, LogitsRunner
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler, run_to_end, shares


class PromptLogprobRunner(LogitsRunner):
    """As its base, with logits for the rows that tell prompt logprobs."""

    def run(self, plan: StepPlan) -> StepResult:
        self._write_all(plan)
        drawn = [logits_after(self.read_back(s)) for s in plan.sequences if s.draw is not None]
        prompt_rows = []
        for sequence in plan.sequences:
            if sequence.prompt_logprobs is not None:
                end = sequence.first_position + sequence.prompt_logprobs.first_row + 1
                prefix = self.read_back(sequence)
                prompt_rows += [logits_after(prefix[: end + i]) for i in range(len(sequence.prompt_logprobs.token_ids))]
        logits = torch.stack(drawn + prompt_rows) if drawn + prompt_rows else torch.empty(0, VOCAB)
        return step_result(plan, HeadOutput(logits, None), TorchSampler())


def logits_after(prefix: list[int]) -> torch.Tensor:
    seed = pseudo_token(prefix, 0, 2**31)
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def by_definition(request: EngineRequest) -> list[TokenLogprob]:
    prompt, count = list(request.prompt_token_ids), request.sampling_params.prompt_logprobs
    draw = draw_params(seed=0, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0, num_logprobs=count)
    rows = (logits_after(prompt[:end])[None] for end in range(1, len(prompt)))
    return [token_logprobs(row, [draw], [token])[0] for row, token in zip(rows, prompt[1:], strict=True)]


def asking(request_id: str, prompt_len: int, count: int | None = 2, shift=0, **wish) -> EngineRequest:
    prompt = tuple((shift + i * i) % VOCAB for i in range(prompt_len))
    params = {"max_tokens": 10, "ignore_eos": True, "prompt_logprobs": count, **wish}
    return make_request(request_id, prompt=prompt, **params)


def completed(scheduler, *requests: EngineRequest, num_blocks=64) -> dict[str, list[TokenDelta]]:
    runner = PromptLogprobRunner(num_blocks, BLOCK_SIZE, VOCAB)
    deltas = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        scheduler.check_integrity()
        for delta in scheduler.commit(plan, runner.run(plan)):
            deltas[delta.attempt].append(delta)
    return deltas


def told(deltas: list[TokenDelta]) -> list[TokenLogprob]:
    """What the deltas of a request say of its prompt: all of it with output token 0."""
    assert not any(delta.prompt_logprobs for delta in deltas if delta.first_token_index > 0)
    return [item for delta in deltas for item in delta.prompt_logprobs]


@pytest.mark.parametrize("max_num_batched_tokens", [64, 7, 4, 1])
@pytest.mark.parametrize("prompt_len", [1, 2, 5, 30])
def test_prompt_logprobs_are_told_whole_or_in_chunks(prompt_len, max_num_batched_tokens):
    request = asking("a", prompt_len)
    scheduler = make_scheduler(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1)
    assert told(completed(scheduler, request)["a"]) == by_definition(request)


def test_who_does_not_ask_is_told_nothing_and_asks_no_rows():
    scheduler, request = make_scheduler(), asking("a", 20, count=None)
    scheduler.add(request)
    assert scheduler.plan().sequences[0].prompt_logprobs is None
    assert told(completed(make_scheduler(), request)["a"]) == []


def test_outputs_are_those_of_a_request_that_does_not_ask():
    asked, silent = (
        [token_id for delta in completed(make_scheduler(), asking("a", 20, count))["a"] for token_id in delta.token_ids]
        for count in (3, None)
    )
    assert asked == silent


def test_a_prompt_is_computed_though_the_cache_holds_it():
    scheduler = make_scheduler(prefix_caching=True)
    completed(scheduler, asking("silent", 20, count=None))
    deltas = completed(scheduler, asking("a", 20))["a"]
    assert told(deltas) == by_definition(asking("a", 20))
    assert deltas[0].num_cached_tokens == 0
    assert completed(scheduler, asking("b", 20, count=None))["b"][0].num_cached_tokens == 16


def test_its_blocks_are_stored_for_others():
    scheduler = make_scheduler(prefix_caching=True)
    completed(scheduler, asking("a", 20))
    assert completed(scheduler, asking("b", 20, count=None))["b"][0].num_cached_tokens == 16


def test_siblings_fork_from_one_that_asks_and_one_that_asks_forks_from_none():
    requests = [
        EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            group_id="g",
        )
        for request in (asking("a", 9), asking("b", 9), asking("c", 9, count=None))
    ]
    scheduler = make_scheduler()
    deltas = completed(scheduler, *requests)
    assert told(deltas["a"]) == told(deltas["b"]) == by_definition(requests[0])
    assert scheduler.stats().num_forked_tokens == 8


def test_preempted_before_its_first_token_it_tells_all_and_afterwards_nothing_again():
    for num_blocks, chunk in ((16, 3), (20, 16), (16, 64)):
        requests = [asking(str(i), 14, shift=i, max_tokens=24) for i in range(5)]
        scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=chunk, max_num_seqs=3)
        deltas = completed(scheduler, *requests, num_blocks=num_blocks)
        assert scheduler.stats().num_preemptions > 0
        for request in requests:
            assert told(deltas[request.request_id]) == by_definition(request)
            assert sum(len(delta.token_ids) for delta in deltas[request.request_id]) == 24


def test_prompt_logprobs_told_before_a_preemption_are_not_told_again():
    scheduler, runner = make_scheduler(max_num_batched_tokens=6), PromptLogprobRunner(64, BLOCK_SIZE, VOCAB)
    request = asking("a", 14)
    scheduler.add(request)
    for _ in range(2):
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
    (sequence,) = scheduler._queues.running
    scheduler._queues.preempt(sequence)
    deltas, num_logprobs_told = [], []
    while (plan := scheduler.plan()) is not None:
        num_logprobs_told.append(sum(len(s.prompt_logprobs.token_ids) for s in plan.sequences if s.prompt_logprobs))
        deltas += scheduler.commit(plan, runner.run(plan))
    assert num_logprobs_told[:3] == [0, 0, 1]
    assert told(deltas) == by_definition(request)


def test_a_continued_request_tells_nothing_of_its_prompt():
    whole = completed(make_scheduler(), asking("a", 14))["a"]
    outputs = tuple(token_id for delta in whole for token_id in delta.token_ids)
    request = asking("a", 14, outputs=outputs[:2])
    rest = completed(make_scheduler(), request)["a"]
    assert told(rest) == []
    assert tuple(token_id for delta in rest for token_id in delta.token_ids) == outputs[2:]


def test_a_step_rates_a_bounded_number_of_tokens_and_leaves_the_rest_to_others(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROBS", 8)
    requests = [asking("a", 20), asking("b", 14, shift=3), asking("c", 10, count=None, shift=5)]
    scheduler = make_scheduler(max_num_batched_tokens=64)
    for request in requests:
        scheduler.add(request)
    runner, plans, deltas = PromptLogprobRunner(64, BLOCK_SIZE, VOCAB), [], {"a": [], "b": [], "c": []}
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
        for delta in scheduler.commit(plan, runner.run(plan)):
            deltas[delta.attempt].append(delta)
    assert [shares(plan) for plan in plans[:3]] == [
        [(0, 0, 8), (2, 0, 10)],
        [(2, 10, 1), (0, 8, 8)],
        [(2, 11, 1), (0, 16, 4), (1, 0, 5)],
    ]
    assert (
        max(sum(len(s.prompt_logprobs.token_ids) for s in plan.sequences if s.prompt_logprobs) for plan in plans) == 8
    )
    assert [told(deltas[name]) for name in "abc"] == [*map(by_definition, requests[:2]), []]


@pytest.mark.parametrize("count", [-2, 1025])
def test_bad_counts_are_refused_by_name(count):
    with pytest.raises(InvalidRequestError, match=r"sampling_params.prompt_logprobs.*must be in \[-1, 1024\]"):
        asking("a", 3, count)


def test_an_aborted_request_leaves_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(asking("a", 14))
    plan = scheduler.plan()
    delta = scheduler.abort("a")
    assert scheduler.commit(plan, PromptLogprobRunner(64, BLOCK_SIZE, VOCAB).run(plan)) == []
    assert delta.prompt_logprobs == ()
    assert run_to_end(scheduler) == []
