"""What the native sampler finds in a row without sorting it is what PyTorch's sampler finds: the k-th best, the best
tokens, a rank, a small nucleus; among equal logits, and where samples mislead too."""

import pytest
import torch
from torch import Tensor

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.executors.step_sampler import HeadOutput
from tests.draw_params import changed, draw_params
from tests.reference.step_sampler import TorchSampler
from tests.worker.executors.cpu.native import library_or_skip

PLAIN = draw_params(seed=7, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)
TORCH = TorchSampler()


@pytest.fixture(scope="module")
def native():
    library_or_skip()
    sampler = OwnPoolSampler.with_threads(2)
    yield sampler
    sampler.close()


def normal(vocab: int, scale: float = 2.0) -> Tensor:
    return torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


def few_levels(vocab: int) -> Tensor:
    """Whole numbers, so that hundreds of tokens are equal."""
    return normal(vocab).round()


def misleading(vocab: int) -> Tensor:
    """Every place at which a sample of 128 could look is low, and all of the others are high."""
    logits = normal(vocab).abs()
    blocks = -(-vocab // 64) * 64
    logits[:, [min(vocab - 1, blocks * i // 128) for i in range(128)]] -= 50.0
    return logits


ROWS = {"normal": normal, "few levels": few_levels, "misleading": misleading, "equal": lambda vocab: normal(vocab) * 0}


@pytest.mark.parametrize("vocab", [1000, 20_000])
@pytest.mark.parametrize("kind", ROWS)
def test_any_top_k_leaves_what_it_leaves_in_pytorch(native, kind, vocab):
    logits = ROWS[kind](vocab)
    for top_k in (1, 2, 77, 250, 300, 700, 5000, 19_999):
        draws = [changed(PLAIN, seed=seed, top_k=min(top_k, vocab - 1), temperature=40.0) for seed in range(4)]
        drawn = native.sample(HeadOutput(logits, None), draws).token_ids
        assert drawn == TORCH.sample(HeadOutput(logits, None), draws).token_ids, top_k
        for row, token in enumerate(drawn):
            assert logits[row, token] >= logits[row].sort(descending=True).values[draws[row].sampling.top_k - 1]


@pytest.mark.parametrize("kind", ROWS)
def test_searches_for_best_tokens_and_ranks_are_those_of_pytorch(native, kind):
    logits = ROWS[kind](20_037)
    for num_logprobs in (0, 1, 20, 500):
        draws = [changed(PLAIN, seed=seed, temperature=3.0, num_logprobs=num_logprobs) for seed in range(4)]
        got = native.sample(HeadOutput(logits, None), draws).logprobs
        expected = TORCH.sample(HeadOutput(logits, None), draws).logprobs
        for one, other in zip(got, expected, strict=True):
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 9.0])
def test_draws_from_a_small_nucleus_are_those_of_pytorch(native, scale):
    """The level that is guessed below a nucleus never cuts into it, and all tokens of one level stay together."""
    for logits in (normal(20_037, scale), few_levels(20_037) * scale):
        for top_p in (1e-6, 0.01, 0.1, 0.25, 0.39, 0.41):
            draws = [changed(PLAIN, seed=seed, top_p=top_p, min_p=1e-9 * (seed % 2)) for seed in range(4)]
            drawn = native.sample(HeadOutput(logits, None), draws).token_ids
            assert drawn == TORCH.sample(HeadOutput(logits, None), draws).token_ids, top_p


def test_a_level_that_is_guessed_too_high_is_not_used(native):
    """The blocks that are looked at hold an eighth of the mass, and by their look two thirds."""
    logits = torch.rand(1, 20_037, generator=torch.Generator().manual_seed(2))
    for block in range(8, 20_037 // 64, 16):
        logits[0, 64 * block : 64 * (block + 1)] += 1.0
    logits = logits.repeat(20, 1)
    draws = [changed(PLAIN, seed=seed, top_p=0.35) for seed in range(20)]
    drawn = native.sample(HeadOutput(logits, None), draws).token_ids
    assert drawn == TORCH.sample(HeadOutput(logits, None), draws).token_ids
