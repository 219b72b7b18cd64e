"""Draws on the device are the native sampler's: the same tokens, log-probabilities and ranks, to the bit."""

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.decoder.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.decoder.cpu.sampler import NativeSampler
from holdfast.worker.decoder.gpu.sampler import DeviceSampler
from holdfast.worker.plan.logits_settings import LogitsSettings
from holdfast.worker.plan.step_plan import NO_TOKEN, DrawParams, PromptLogprobParams
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import Sampled
from tests.worker.decoder.cpu.native import library_or_skip

INF, NAN = float("inf"), float("nan")
PLAIN = DrawParams(seed=7, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)
FILTERS = {
    "plain": PLAIN,
    "greedy": replace(PLAIN, temperature=0.0),
    "hot": replace(PLAIN, temperature=60.0),
    "top-p": replace(PLAIN, temperature=0.8, top_p=0.95),
    "narrow top-p": replace(PLAIN, temperature=1.7, top_p=0.02),
    "top-k": replace(PLAIN, top_k=20),
    "large top-k": replace(PLAIN, top_k=150, temperature=3.0),
    "min-p": replace(PLAIN, min_p=0.05, temperature=1.3),
    "all": replace(PLAIN, temperature=1.1, top_k=50, top_p=0.9, min_p=0.001),
}


SETTINGS = {
    "allowed": LogitsSettings(allowed_token_ids=array("q", [3, 4, 5, 100_000, -1, 2**40, 64, 65])),
    "unknown allowed": LogitsSettings(allowed_token_ids=array("q", [100_000])),
    "bad words": LogitsSettings(bad_words=((1, 2, 9), (2, 11), (5,))),
    "min tokens": LogitsSettings(min_tokens=50, end_token_ids=(0, 1, 2, 7)),
    "bans of all": LogitsSettings(allowed_token_ids=array("q", [5]), bad_words=((5,),)),
    "bias": LogitsSettings(logit_bias=((4, 9.5), (8, -100.0), (99_999, 3.0))),
    "penalties": LogitsSettings(
        repetition_penalty=1.7,
        frequency_penalty=0.8,
        presence_penalty=-0.6,
        prompt_token_ids=array("q", [1, 3, 70_000]),
    ),
    "grammar": LogitsSettings(grammar="x", allowed_token_ids=array("q", [1, 2, 3])),
    "another grammar": LogitsSettings(grammar="x", allowed_token_ids=array("q", [6, 8])),
    "all": LogitsSettings(
        grammar="x",
        bad_words=((2, 12),),
        logit_bias=((20, 5.0), (24, -3.0), (2, 30.0)),
        repetition_penalty=0.6,
        frequency_penalty=1.9,
        presence_penalty=1.1,
        prompt_token_ids=array("q", range(0, 60, 2)),
    ),
}


class Replayed:
    """A graph that runs its work again."""

    def __init__(self, work):
        self.replay = work


def device_sampler(capture=None) -> DeviceSampler:
    return DeviceSampler(torch.device("cpu"), launch=launch, capture=capture)


@pytest.fixture(scope="module")
def native():
    library_or_skip()
    sampler = NativeSampler.with_threads(1)
    yield sampler
    sampler.close()


def made(num_rows: int, vocab: int, scale: float = 3.0, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def seeded(params: DrawParams, count: int) -> list[DrawParams]:
    """Draws of seeds beyond 32 bits too, and of different positions."""
    return [replace(params, seed=seed * 0x1_2345_6789 % 2**63, first_output_index=seed % 97) for seed in range(count)]


def sampled(sampler, logits: Tensor, *args) -> Sampled:
    return sampler.sample(HeadOutput(logits, None), *args)


def assert_same(native, logits: Tensor, draws, prompts=(), masks=None) -> None:
    """The logits are left as they were."""
    expected, own = sampled(native, logits, draws, masks, prompts), logits.clone()
    assert sampled(device_sampler(), own, draws, masks, prompts) == expected
    assert torch.equal(own.view(torch.int32), logits.view(torch.int32))


def test_each_kind_of_draw_in_one_batch(native):
    """Greedy rows and drawn ones, filters alone and together, ties, -inf, rows that are broken."""
    draws = [replace(params, seed=5 + row) for row, params in enumerate(FILTERS.values())]
    logits = made(len(draws) + 4, 1090)
    logits[:, 1] = logits[:, 1000] = logits.amax(1)
    logits[2, ::2] = -INF
    logits[-4:, 7] = torch.tensor([NAN, INF, -INF, 1e-42])
    logits[-2] = -INF
    draws += [PLAIN, FILTERS["top-p"], PLAIN, FILTERS["all"]]
    assert_same(native, logits, draws)
    assert sampled(device_sampler(), logits, draws).token_ids[-4:-1] == [NO_TOKEN] * 3


def test_logprobs_of_draws_and_prompts(native):
    logits = made(5, 1090)
    logits[1, 5:900] = -INF
    logits[2, [3, 4, 800]] = 9.0
    logits[3, 17] = NAN
    counts = (0, 20, 3, 2)
    draws = [replace(PLAIN, seed=row, num_logprobs=count) for row, count in enumerate(counts[:2])]
    prompts = [PromptLogprobParams(first_row=0, token_ids=(800, 5), num_logprobs=3)]
    assert_same(native, logits[:4], draws, prompts)
    assert_same(native, logits[4:], [replace(PLAIN, top_p=0.5)])


def edited_batch(vocab: int, seed: int = 0, **changes) -> tuple[Tensor, list[DrawParams], dict[int, bytes]]:
    """Each setting once with a draw and once without, among rows without any."""
    outputs = (*(int(x) for x in torch.arange(30) * 7919 % 37), 4, 4, 9, 1, 2)
    settings_of = [None, *SETTINGS.values(), *SETTINGS.values()]
    draws = [
        replace(
            PLAIN,
            seed=seed + row,
            first_output_index=len(outputs),
            temperature=float(row > len(SETTINGS)),
            logits_settings=item,
            output_token_ids=outputs if item is not None and item.look_back else (),
            **changes,
        )
        for row, item in enumerate(settings_of)
    ]
    mask = bytes([0b0101_0110, 0b1000_0000, 0, 255] * 5)
    masks = {row: mask for row, item in enumerate(settings_of) if item is not None and item.grammar}
    return made(len(draws), vocab, 4.0, seed + 1), draws, masks


def test_logits_processors(native):
    """Of one row all but the banned tokens are -inf; one is broken where a token is banned."""
    logits, draws, masks = edited_batch(129)
    logits[3, [*range(5), *range(6, 11), *range(12, 129)]] = -INF
    logits[4, 7] = NAN
    assert_same(native, logits, draws, (), masks)


def test_logprobs_are_raw_after_edits_too(native):
    logits, draws, masks = edited_batch(70, top_p=0.9, num_logprobs=2)
    assert_same(
        native, logits[10:15], draws[10:15], (), {row - 10: mask for row, mask in masks.items() if 10 <= row < 15}
    )


def test_a_row_is_drawn_alike_in_any_company_and_padding():
    """Graphs pad rows up to their size; what lies behind the wanted rows is not read."""
    logits, draws = made(3, 200), seeded(replace(PLAIN, top_p=0.7, num_logprobs=2), 3)
    alone = [sampled(device_sampler(), logits[row : row + 1], draws[row : row + 1]) for row in range(3)]
    padded = device_sampler(capture=Replayed)
    for _ in range(2):
        together = sampled(padded, logits, draws)
        assert together.token_ids == [token for each in alone for token in each.token_ids]
        assert together.logprobs == [told for each in alone for told in each.logprobs]
    fewer = sampled(padded, logits[1:], draws[1:])
    assert fewer.token_ids == together.token_ids[1:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 1000, 3001, 9000])
def test_tokens_of_all_kinds(native, vocab, scale):
    for params in FILTERS.values():
        assert_same(native, made(8, vocab, scale), seeded(replace(params, num_logprobs=5), 8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_of_a_large_vocabulary(native):
    logits = made(1, 151_936, 2.0)
    for params in FILTERS.values():
        assert_same(native, logits, seeded(replace(params, num_logprobs=20), 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vocab", [31, 1000, 2049])
def test_logits_processors_of_all_kinds(native, vocab):
    for seed, params in enumerate(FILTERS.values()):
        changes = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p, "num_logprobs": 3}
        logits, draws, masks = edited_batch(vocab, 100 * seed, **changes)
        assert_same(native, logits, draws, (), masks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100)
@given(st.data())
def test_any_edit(native, data):
    """Lists with repeated and unknown tokens, masks shorter and longer than the vocabulary."""
    vocab = data.draw(st.integers(1, 1500))
    ids = st.integers(-3, vocab + 40)
    biases = data.draw(
        st.dictionaries(ids.filter(lambda token: token >= 0), st.floats(-100, 100, width=32), max_size=8)
    )
    grammar = data.draw(st.none() | st.binary(min_size=1, max_size=200))
    params = replace(
        PLAIN,
        seed=data.draw(st.integers(0, 2**63 - 1)),
        temperature=data.draw(st.sampled_from((0.0, 0.7, 2.0))),
        top_k=data.draw(st.sampled_from((0, 3, 200))),
        top_p=data.draw(st.sampled_from((1.0, 0.9, 0.1))),
        first_output_index=4,
        output_token_ids=tuple(data.draw(st.lists(ids, max_size=50))),
        num_logprobs=data.draw(st.none() | st.integers(0, 3)),
        logits_settings=LogitsSettings(
            allowed_token_ids=data.draw(
                st.none() | st.lists(ids, min_size=1, max_size=60).map(lambda x: array("q", x))
            ),
            bad_words=tuple((token,) for token in data.draw(st.lists(ids, max_size=6))),
            min_tokens=data.draw(st.sampled_from((0, 9))),
            end_token_ids=(0, 1),
            grammar="" if grammar is None else "x",
            logit_bias=tuple(biases.items()),
            repetition_penalty=data.draw(st.sampled_from((1.0, 0.7, 1.3, 7.77))),
            frequency_penalty=data.draw(st.floats(-2, 2)),
            presence_penalty=data.draw(st.floats(-2, 2)),
            prompt_token_ids=array("q", sorted(set(data.draw(st.lists(ids, max_size=30))))),
        ),
    )
    logits = made(1, vocab, 5.0, params.seed % 1000)
    if data.draw(st.booleans()):
        logits[torch.rand(1, vocab, generator=torch.Generator().manual_seed(params.seed % 999)) < 0.9] = -INF
        logits[0, vocab // 2] = 1.0
    assert_same(native, logits, [params], (), None if grammar is None else {0: grammar})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=200)
@given(
    vocab=st.integers(1, 2500),
    scale=st.floats(0.0, 20.0),
    levels=st.sampled_from((0, 3, 40)),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    temperature=st.floats(0.01, 50.0),
    top_k=st.integers(0, 2600),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 1.0),
    num_logprobs=st.none() | st.integers(0, 20),
)
def test_any_draw(native, vocab, scale, levels, share, seed, position, temperature, top_k, top_p, min_p, num_logprobs):
    """Logits of few levels tie; a share of them is -inf."""
    logits = made(1, vocab, scale, seed % 1000)
    if levels:
        logits = (logits * levels).round() / levels
    chosen = torch.rand(1, vocab, generator=torch.Generator().manual_seed(seed % 1001)) < share
    logits[chosen & (logits < logits.amax())] = -INF
    params = DrawParams(
        seed=seed,
        first_output_index=position,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_logprobs=num_logprobs,
    )
    assert_same(native, logits, [params])
