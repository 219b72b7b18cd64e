"""The native sampler draws what PyTorch's draws, with the same bits in every class and on any number of threads."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.draws import DrawParams
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.step_sampler import HeadOutput, Sampled
from holdfast.worker.step_plan import NO_TOKEN, PromptLogprobParams
from tests.draw_params import changed, draw_params
from tests.examples import examples
from tests.reference.sampler import keep_min_p, keep_top_k, keep_top_p, noise, noise_key
from tests.reference.step_sampler import TorchSampler
from tests.worker.executors.cpu.native import CLASSES, library_or_skip
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_known_answers import whole_numbers
from tests.worker.executors.gpu import drawn
from tests.worker.executors.gpu.drawn import PLAIN, SETTINGS, made, sampled, seeded
from tests.worker.executors.steps import Part

INF, NAN = float("inf"), float("nan")
TORCH = TorchSampler()
FILTERS = {
    "plain": PLAIN,
    "greedy": changed(PLAIN, temperature=0.0),
    "cold": changed(PLAIN, temperature=0.02),
    **drawn.FILTERS,
    "large top-k": changed(PLAIN, top_k=1500, temperature=3.0),
}
"""In the order of the answers that are stored."""


@pytest.fixture(scope="module")
def native():
    library_or_skip()
    sampler = OwnPoolSampler.with_threads(2)
    yield sampler
    sampler.close()


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 1000, 3001])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_pytorch(native, name, vocab, scale):
    logits = made(64, vocab, scale)
    draws = seeded(FILTERS[name], 64)
    assert sampled(native, logits, draws).token_ids == sampled(TORCH, logits, draws).token_ids


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_of_a_large_vocabulary_are_those_of_pytorch(native, name):
    logits = made(8, 151_936, 2.0)
    draws = seeded(FILTERS[name], 8)
    assert sampled(native, logits, draws).token_ids == sampled(TORCH, logits, draws).token_ids


def by_definition(logits: Tensor, params: DrawParams) -> int:
    """The race over every token that the filters leave, in float64."""
    scaled = logits[None] * torch.tensor(1 / params.sampling.temperature, dtype=torch.float32)
    if params.sampling.min_p > 0:
        scaled = keep_min_p(scaled, [params.sampling.min_p])
    if 0 < params.sampling.top_k < len(logits):
        scaled = keep_top_k(scaled, [params.sampling.top_k])
    if params.sampling.top_p < 1:
        scaled = keep_top_p(scaled, [params.sampling.top_p])
    key = torch.tensor(noise_key(params.seed, params.first_output_index, 0))
    u = (noise(key, torch.arange(len(logits))).double() + 0.5) / 2**32
    return int((scaled[0].double() - (-(-u).log1p()).log()).argmax())


@settings(deadline=None, max_examples=examples(200))
@given(
    vocab=st.integers(1, 400),
    scale=st.just(0.0) | st.floats(0.01, 20.0),  # else tokens of other logits have equal probabilities in float64
    seed=st.integers(0, 2**63 - 1),
    temperature=st.floats(0.01, 50.0),
    top_k=st.integers(0, 500),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_filters_leave_what_the_definition_does(native, vocab, scale, seed, temperature, top_k, top_p, min_p):
    params = draw_params(
        seed=seed, first_output_index=3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    logits = made(1, vocab, scale, seed % 1000)
    assert sampled(native, logits, [params]).token_ids == [by_definition(logits[0], params)]


def test_equal_logits_stay_together(native):
    """Half of the mass is one of four equal tokens and a bit of the next: all four stay, and nothing else."""
    logits = torch.zeros(1, 300)
    logits[0, [5, 70, 130, 299]] = 9.0
    for params in (changed(PLAIN, top_p=0.3), changed(PLAIN, top_k=1), changed(PLAIN, min_p=1.0)):
        drawn = {sampled(native, logits, [changed(params, seed=seed)]).token_ids[0] for seed in range(100)}
        assert drawn == {5, 70, 130, 299}
    assert sampled(native, logits, [FILTERS["greedy"]]).token_ids == [5]


@pytest.mark.parametrize("vocab", [70, 129, 1000])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_processors_are_those_of_pytorch(native, name, vocab):
    logits = made(40, vocab, 4.0)
    outputs = (*whole_numbers(30, 5).abs().tolist(), 1, 2)
    settings_ = SETTINGS[name]
    draws = [
        changed(base, logits_settings=settings_ if row % 3 else None, output_token_ids=outputs if row % 3 else ())
        for row, base in enumerate(seeded(FILTERS["plain"], 20) + seeded(FILTERS["greedy"], 20))
    ]
    bits = whole_numbers(40 * vocab, 9).view(40, vocab) % 3 == 0
    masks = {
        row: np.packbits(bits[row, : vocab - 5].numpy(), bitorder="little").tobytes()
        for row, params in enumerate(draws)
        if params.logits_settings is not None and settings_.grammar and row % 2
    }
    before = logits.clone()
    assert sampled(native, logits, draws, masks).token_ids == sampled(TORCH, logits, draws, masks).token_ids
    assert torch.equal(logits, before)  # edits are undone


def same_report(ours: Sampled, reference: Sampled) -> None:
    assert ours.token_ids == reference.token_ids
    for said, wanted in zip(
        ours.logprobs + ours.prompt_logprobs, reference.logprobs + reference.prompt_logprobs, strict=True
    ):
        assert (said is None) == (wanted is None)
        if said is not None and wanted is not None:
            assert (said.token_id, said.rank) == (wanted.token_id, wanted.rank)
            assert [token for token, _ in said.top] == [token for token, _ in wanted.top]
            values = [said.logprob] + [value for _, value in said.top]
            assert values == pytest.approx([wanted.logprob] + [value for _, value in wanted.top], abs=2e-6, rel=2e-7)


@pytest.mark.parametrize("vocab", [15, 65, 1000, 50_001])
def test_logprobs_ranks_and_the_best_are_those_of_pytorch(native, vocab):
    logits = made(14, vocab)
    logits[2] = (logits[2] * 2).round() / 2  # many equal ones
    logits[3, ::2] = 0.0
    logits[3, 1::2] = -0.0
    draws = [changed(params, num_logprobs=None if i == 4 else i) for i, params in enumerate(seeded(PLAIN, 10))]
    prompts = [
        PromptLogprobParams(first_row=0, token_ids=(1, 14), num_logprobs=0),
        PromptLogprobParams(first_row=0, token_ids=(0, vocab - 1), num_logprobs=20),
    ]
    same_report(sampled(native, logits, draws, None, prompts), sampled(TORCH, logits, draws, None, prompts))


def test_a_penalty_does_not_touch_the_report(native):
    logits = made(1, 500)
    draws = [changed(PLAIN, num_logprobs=3, logits_settings=SETTINGS["bias"])]
    same_report(sampled(native, logits, draws), sampled(TORCH, logits, draws))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 17, 999])
def test_a_row_that_is_no_numbers_gives_no_token_and_leaves_the_others(native, bad, place):
    logits = made(3, 1000)
    draws = [changed(PLAIN, num_logprobs=1, logits_settings=SETTINGS["allowed"])] * 3
    right = sampled(native, logits, draws)
    logits[1, place if bad != -INF else slice(None)] = bad
    broken = sampled(native, logits, draws)
    assert broken.token_ids == [right.token_ids[0], NO_TOKEN, right.token_ids[2]]
    assert (broken.logprobs[0], broken.logprobs[2]) == (right.logprobs[0], right.logprobs[2])


def test_a_logit_of_zero_can_be_refused(native):
    """Next above zero is a denormal number, which counts as zero here."""
    logits = torch.zeros(1, 200)
    logits[0, 50] = 3.0
    draws = seeded(changed(PLAIN, top_p=0.05), 40)
    assert sampled(native, logits.expand(40, 200).contiguous(), draws).token_ids == [50] * 40


@pytest.mark.parametrize("vocab", [64, 500])
def test_what_the_head_knows_of_blocks_changes_nothing(native, vocab):
    logits = made(len(FILTERS) * 4, vocab)
    logits[3, 7], logits[9, 8] = NAN, -INF
    draws = [changed(params, num_logprobs=3) for name in FILTERS for params in seeded(FILTERS[name], 4)]
    padded = torch.nn.functional.pad(logits, (0, -vocab % 64), value=-INF).view(len(logits), -1, 64)
    block_best = padded.amax(2)
    block_best[9, 0] = NAN  # of a block with a logit that is not finite
    message = native.sample(HeadOutput(logits, None, block_best), draws)
    assert repr(message) == repr(sampled(native, logits, draws))


@pytest.mark.parametrize("name", CLASSES)
def test_log_probabilities_are_of_the_heads_own_sums_to_the_same_bits(name):
    library_or_skip(name)
    runner, ids = Runner(layout_of("llama"), name=name), tokens(30)
    output = runner.head(Part(0, ids, runner.blocks(30)))
    padded = torch.nn.functional.pad(output.logits, (0, -output.logits.shape[1] % 64), value=-INF).view(30, -1, 64)
    exact = (padded.double() - padded.double().amax(2, keepdim=True)).exp().sum(2)
    assert torch.allclose(output.block_mass.double(), exact, rtol=1e-6)
    sampler = runner.executor.make_sampler()
    draws = seeded(changed(FILTERS["top-p"], num_logprobs=5), 30)
    assert repr(sampler.sample(output, draws)) == repr(sampled(sampler, output.logits, draws))
    doubled = replace(output, block_mass=2 * output.block_mass)  # they are what is used
    message, more = sampler.sample(output, draws), sampler.sample(doubled, draws)
    gap = [one.logprob - other.logprob for one, other in zip(message.logprobs, more.logprobs, strict=True)]
    assert gap == pytest.approx([math.log(2)] * 30, abs=1e-5)
    sampler.close()
    runner.close()


def test_no_rows_are_no_error(native):
    assert sampled(native, torch.empty(0, 100), []) == Sampled([], [], [])


def answers(sampler: NativeSampler) -> str:
    """A digest of tokens and bits of log-probabilities of a load with everything in it."""
    heard = []
    for vocab, scale in ((1000, 0.02), (151_936, 0.1), (333, 0.002)):
        rows = 2 * len(FILTERS)
        logits = whole_numbers(rows * vocab, vocab).view(rows, vocab).float() * scale
        draws = [changed(params, num_logprobs=5) for name in FILTERS for params in seeded(FILTERS[name], 2)]
        heard.append(sampled(sampler, logits, draws))
    return hashlib.sha256(repr(heard).encode()).hexdigest()[:16]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_gives_the_answers_that_are_stored(name, threads):
    """A change of them changes completions: it takes the next `NativeSampler.numerics`."""
    library_or_skip(name)
    sampler = OwnPoolSampler.with_threads(threads, name)
    assert answers(sampler) == "930332d199308820"
    sampler.close()


class OnADevice:
    """Logits that are not in main memory."""

    def __init__(self, logits) -> None:
        self._logits = logits

    def cpu(self):
        return self._logits


def test_logits_of_a_device_without_a_sampler_are_drawn_from_in_main_memory(native):
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(2))
    there = native.sample(HeadOutput(OnADevice(logits), None), [PLAIN, PLAIN])
    assert there == native.sample(HeadOutput(logits, None), [PLAIN, PLAIN])
