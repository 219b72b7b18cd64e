"""Controls through the scheduler: preempted, continued elsewhere or run through, a request draws the same tokens."""

import hashlib
import random
from array import array

import pytest
import torch

from holdfast.worker.engine.steps_in_flight import step_result
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.step_plan import ScheduledSequence, StepPlan, StepResult
from tests.pseudo_model import PseudoRunner
from tests.reference.step_sampler import TorchSampler
from tests.worker.schedulers import BLOCK_SIZE, EOS, make_request, make_scheduler

VOCAB = 24
SETTINGS = {
    "plain": {},
    "repetition": {"repetition_penalty": 3.0},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "presence": {"presence_penalty": -2.0},
    "minimum": {"min_tokens": 9, "stop_token_ids": [5, 6]},
    "allowed": {"allowed_token_ids": [3, 4, 5, 6, 7], "min_p": 0.05},
    "all": {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 5},
}


class LogitsRunner(PseudoRunner):
    """A pseudo-model with logits, a hash of the tokens read back from the blocks; the draws are the sampler's."""

    def run(self, plan: StepPlan) -> StepResult:
        self._write_all(plan)
        rows = [self._logits(sequence) for sequence in plan.sequences if sequence.draw is not None]
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        return step_result(plan, HeadOutput(logits, None), TorchSampler())

    def _logits(self, sequence: ScheduledSequence) -> torch.Tensor:
        digest = hashlib.blake2b(repr(self.read_back(sequence)).encode(), digest_size=4).digest()
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(int.from_bytes(digest))) * 2


def wish(name: str, outputs=(), prompt=None, **params) -> EngineRequest:
    request = make_request(
        name,
        outputs=tuple(outputs),
        prompt=prompt,
        **{"max_tokens": 30, "ignore_eos": True, **SETTINGS[name], **params},
    )
    words = ((8,), (9, 9), (10, 11)) if name == "all" else ()
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        output_token_ids=request.output_token_ids,
        bad_word_token_ids=words,
    )


def completed(*requests: EngineRequest, num_blocks=64) -> tuple[dict[str, list[int]], dict[str, FinishReason], int]:
    """Outputs and endings of requests that run together, and how often one was preempted."""
    scheduler, runner = make_scheduler(num_blocks=num_blocks), LogitsRunner(num_blocks, BLOCK_SIZE, VOCAB)
    outputs = {request.request_id: list(request.output_token_ids) for request in requests}
    reasons = {}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        for delta in scheduler.commit(plan, runner.run(plan)):
            outputs[delta.attempt] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.attempt] = delta.finish_reason
    return outputs, reasons, scheduler.stats().num_preemptions


def alone(name: str) -> list[int]:
    return completed(wish(name))[0][name]


def test_strangers_and_preemptions_change_nothing():
    outputs, _, num_preemptions = completed(*map(wish, SETTINGS), num_blocks=12)
    assert num_preemptions > 0
    assert outputs == {name: alone(name) for name in SETTINGS}
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(SETTINGS), "each setting has an effect"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_continued_request_goes_on_as_if_it_had_never_stopped(name):
    whole = alone(name)
    for num_before in random.Random(name).sample(range(1, len(whole)), min(4, len(whole) - 1)):
        assert completed(wish(name, whole[:num_before]))[0][name] == whole


def test_the_minimum_is_released_at_exactly_that_many_tokens():
    """Nothing but the end of sequence is wanted, and it comes as the first token that may be it."""
    for least in range(6):
        request = wish("plain", min_tokens=least, logit_bias={EOS: 100}, ignore_eos=False)
        outputs, reasons, _ = completed(request)
        assert (outputs["plain"].index(EOS), len(outputs["plain"])) == (least, least + 1)
        assert reasons["plain"] is FinishReason.STOP


def test_logits_processors_that_have_had_their_time_cost_nothing_more():
    scheduler = make_scheduler()
    scheduler.add(wish("plain", min_tokens=2))
    runner, has_logits_settings = LogitsRunner(64, BLOCK_SIZE, VOCAB), []
    for _ in range(4):
        plan = scheduler.plan()
        has_logits_settings.append(plan.sequences[0].draw.logits_settings is not None)
        scheduler.commit(plan, runner.run(plan))
    assert has_logits_settings == [True, True, False, False]


def test_min_p_is_handed_to_the_sampler():
    scheduler = make_scheduler()
    scheduler.add(wish("allowed"))
    assert scheduler.plan().sequences[0].draw.sampling.min_p == 0.05


def test_outputs_are_handed_to_the_sampler_only_where_it_looks_back():
    for name in SETTINGS:
        scheduler = make_scheduler()
        scheduler.add(wish(name, outputs=[3, 4]))
        looks_back = name in {"repetition", "frequency", "presence", "all"}
        assert scheduler.plan().sequences[0].draw.output_token_ids == (array("q", (3, 4)) if looks_back else ())
