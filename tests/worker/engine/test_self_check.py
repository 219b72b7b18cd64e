"""The check is given models that are a few lines long, so that each fault can be planted alone."""

import numpy as np
import pytest

from holdfast.worker.engine.self_check import SelfCheck
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.step_plan import StepPlan

VOCAB = 11
INFO = ModelInfo(
    model="tiny",
    path=".",
    model_type="tiny",
    max_model_len=100,
    vocab_size=VOCAB,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=4,
    num_blocks=64,
    kv_bytes_per_token=1,
    row_invariant=False,
)


class TinyModel:
    """Logits are a function of a token and of the one before it in its sequence, read from a paged cache."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).standard_normal((VOCAB, VOCAB)).astype(np.float32)
        self.cache = np.full((64, 4), -1)
        self.written: set[int] = set()

    def run(self, plan: StepPlan) -> np.ndarray:
        rows = [self.row(*step) for step in self.steps(plan)]
        assert all(sequence.num_draws == len(sequence.token_ids) for sequence in plan.sequences)
        return np.stack(rows)

    def steps(self, plan: StepPlan):
        for sequence in plan.sequences:
            for position, token in enumerate(sequence.token_ids, start=sequence.first_position):
                before = self.cache[sequence.block_ids[(position - 1) // 4], (position - 1) % 4] if position else 0
                self.cache[sequence.block_ids[position // 4], position % 4] = token
                self.written.add(sequence.block_ids[position // 4])
                yield token, int(before)

    def row(self, token: int, before: int) -> np.ndarray:
        return self.table[token] + 0.5 * self.table[before]


class MixesPackedRows(TinyModel):
    """Adds a little of the row before, whoever's it is."""

    def run(self, plan):
        rows = super().run(plan)
        return rows + 0.1 * np.roll(rows, 1, 0)


class ForgetsBetweenSteps(TinyModel):
    """Keeps the token before in itself, as a convolution would, and starts each step without it."""

    def steps(self, plan):
        for sequence in plan.sequences:
            before = 0
            for token in sequence.token_ids:
                yield token, before
                before = token


class RoundsWithTheBatch(TinyModel):
    """The last bits depend on the number of rows."""

    def run(self, plan):
        rows = super().run(plan)
        return rows * (1 + 1e-6 * (len(rows) % 3))


class RoundsWithManySequences(TinyModel):
    """The last bits depend on the number of sequences, as where a product takes eight decodes at a time."""

    def run(self, plan):
        return super().run(plan) * (1 + 1e-6 * (len(plan.sequences) >= 8))


class Overflows(TinyModel):
    def run(self, plan):
        return super().run(plan) * np.inf


class Vanishes(TinyModel):
    """As where an infinite norm has made every state 0."""

    def run(self, plan):
        return super().run(plan) * 0


def test_a_pure_model_passes_bit_for_bit():
    assert SelfCheck(INFO, TinyModel().run).passes_bitwise()


@pytest.mark.parametrize("model", [MixesPackedRows, ForgetsBetweenSteps])
def test_state_outside_the_cache_is_found(model):
    with pytest.raises(UnsupportedModelError, match=r"'tiny'.*mixes tokens outside attention"):
        SelfCheck(INFO, model().run).passes_bitwise()


@pytest.mark.parametrize("model", [RoundsWithTheBatch, RoundsWithManySequences])
def test_rounding_alone_is_no_refusal(model):
    assert not SelfCheck(INFO, model().run).passes_bitwise()


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(UnsupportedModelError, match="not finite in float32"):
        SelfCheck(INFO, Overflows().run).passes_bitwise()


def test_logits_that_are_all_zero_are_no_mixing_of_tokens():
    with pytest.raises(UnsupportedModelError, match="all 0 in float32"):
        SelfCheck(INFO, Vanishes().run).passes_bitwise()


def test_the_blocks_that_were_written_are_those_it_names():
    model = TinyModel()
    check = SelfCheck(INFO, model.run)
    check.passes_bitwise()
    assert set(check.block_ids) == model.written


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(2, 100), (64, 3), (3, 2)])
def test_small_caches_and_contexts_are_checked_with_less(num_blocks, max_model_len):
    from dataclasses import replace

    info = replace(INFO, num_blocks=num_blocks, max_model_len=max_model_len)
    assert SelfCheck(info, TinyModel().run).passes_bitwise()


def test_the_first_blocks_of_a_large_cache_are_used():
    # memory of the cache is taken ahead up to the last block that a step has used
    from dataclasses import replace

    check = SelfCheck(replace(INFO, num_blocks=100_000), TinyModel().run)
    assert max(check.block_ids) == len(check.block_ids) - 1
