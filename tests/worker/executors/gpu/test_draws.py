"""Draws on the device are the native sampler's: the same tokens, log-probabilities and ranks, to the bit."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.draws import LogitsSettings
from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.sampler import DeviceSampler
from holdfast.worker.step_plan import NO_TOKEN, PromptLogprobParams
from tests.draw_params import changed, draw_params
from tests.reference.logits_processors import apply_logits_processors
from tests.worker.executors.cpu.native import library_or_skip
from tests.worker.executors.gpu.drawn import FILTERS, PLAIN, edited_batch, made, sampled, seeded

INF, NAN = float("inf"), float("nan")


class Replayed:
    """A graph that runs its work again."""

    def __init__(self, work):
        self.replay = work


def device_sampler(capture=None) -> DeviceSampler:
    return DeviceSampler(Buffers(torch.device("cpu")), launch=launch, capture=capture)


@pytest.fixture(scope="module")
def native():
    library_or_skip()
    sampler = OwnPoolSampler.with_threads(1)
    yield sampler
    sampler.close()


def assert_same(native, logits: Tensor, draws, prompts=(), masks=None) -> None:
    """The logits are left as they were."""
    expected, own = sampled(native, logits, draws, masks, prompts), logits.clone()
    assert sampled(device_sampler(), own, draws, masks, prompts) == expected
    assert torch.equal(own.view(torch.int32), logits.view(torch.int32))


def test_each_kind_of_draw_in_one_batch(native):
    """Greedy rows and drawn ones, filters alone and together, ties, -inf, rows that are broken."""
    draws = [changed(params, seed=5 + row) for row, params in enumerate(FILTERS.values())]
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
    draws = [changed(PLAIN, seed=row, num_logprobs=count) for row, count in enumerate(counts[:2])]
    prompts = [PromptLogprobParams(first_row=0, token_ids=(800, 5), num_logprobs=3)]
    assert_same(native, logits[:4], draws, prompts)
    assert_same(native, logits[4:], [changed(PLAIN, top_p=0.5)])


def test_logits_processors(native):
    """Of one row all but the banned tokens are -inf; one is broken where a token is banned."""
    logits, draws, masks = edited_batch(129)
    logits[3, [*range(5), *range(6, 11), *range(12, 129)]] = -INF
    logits[4, 7] = NAN
    assert_same(native, logits, draws, (), masks)


def test_edited_rows_are_those_of_pytorch():
    """Not only the tokens that are drawn from them: each logit, and what the masks leave."""
    logits, draws, masks = edited_batch(129)
    seen = {}

    def spy(kernel, grid, arguments, **options):
        launch(kernel, grid, arguments, **options)
        if kernel.fn.__name__ == "edit_rows":
            seen.update({name: arguments[name].clone() for name in ("logits", "masks", "kept", "counts")})

    sampled(DeviceSampler(Buffers(torch.device("cpu")), launch=spy), logits.clone(), draws, masks)
    bits = np.unpackbits(seen["masks"].numpy().view(np.uint8), axis=1, count=129, bitorder="little")
    kept = np.where(seen["kept"].numpy()[:, None] >= 0, bits[seen["kept"].clamp(min=0)], 1)
    expected = logits[1:].clone()
    apply_logits_processors(expected, draws[1:], {row - 1: mask for row, mask in masks.items()})
    assert torch.equal(seen["logits"].where(torch.from_numpy(kept) > 0, -INF)[1:], expected)
    assert not seen["counts"].any()


def test_logprobs_are_raw_after_edits_too(native):
    logits, draws, masks = edited_batch(70, top_p=0.9, num_logprobs=2)
    assert_same(
        native, logits[10:15], draws[10:15], (), {row - 10: mask for row, mask in masks.items() if 10 <= row < 15}
    )


def test_a_row_is_drawn_alike_in_any_company_and_padding():
    """Graphs pad rows up to their size; what lies behind the wanted rows is not read."""
    logits, draws = made(3, 70), seeded(changed(PLAIN, top_p=0.7, num_logprobs=2), 3)
    alone = [sampled(device_sampler(), logits[row : row + 1], draws[row : row + 1]) for row in range(3)]
    padded = device_sampler(capture=Replayed)
    for _ in range(2):
        together = sampled(padded, logits, draws)
        assert together.token_ids == [token for each in alone for token in each.token_ids]
        assert together.logprobs == [message for each in alone for message in each.logprobs]
    fewer = sampled(padded, logits[1:], draws[1:])
    assert fewer.token_ids == together.token_ids[1:]


def test_padding_is_not_drawn_from():
    """A graph of four rows has drawn three tokens, though there are logits behind."""
    drawn = []

    def spy(kernel, grid, arguments, **options):
        launch(kernel, grid, arguments, **options)
        if kernel.fn.__name__ == "settle_races":
            drawn.append(arguments["drawn"].tolist())

    sampler = DeviceSampler(Buffers(torch.device("cpu")), launch=spy, capture=Replayed)
    for _ in range(2):  # as it is, and by the graph
        token_ids = sampled(sampler, made(4, 70)[:3], seeded(PLAIN, 3)).token_ids
    assert drawn == [[*token_ids, NO_TOKEN]] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 1000, 3001, 9000])
def test_tokens_of_all_kinds(native, vocab, scale):
    for params in FILTERS.values():
        assert_same(native, made(8, vocab, scale), seeded(changed(params, num_logprobs=5), 8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_of_a_large_vocabulary(native):
    logits = made(1, 151_936, 2.0)
    for params in FILTERS.values():
        assert_same(native, logits, seeded(changed(params, num_logprobs=20), 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vocab", [31, 1000, 2049])
def test_logits_processors_of_all_kinds(native, vocab):
    for seed, params in enumerate(FILTERS.values()):
        changes = {
            "top_k": params.sampling.top_k,
            "top_p": params.sampling.top_p,
            "min_p": params.sampling.min_p,
            "num_logprobs": 3,
        }
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
    params = changed(
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
    params = draw_params(
        seed=seed,
        first_output_index=position,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        num_logprobs=num_logprobs,
    )
    assert_same(native, logits, [params])
