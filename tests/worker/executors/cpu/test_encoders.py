"""Encoders on the native executor: what the reference computes, with the same bits in any company, class and blocks."""

import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.models.reference import Reference
from tests.worker.executors.cpu.native import BF16, F16, F32, library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_families import check
from tests.worker.executors.models import ENCODER_MODELS
from tests.worker.executors.steps import Part

BITS = {
    "bert": (),
    "modernbert": (("local_attention", 130),),
    "modernbert, windows first": (("num_attention_heads", 1),),
}
SEQUENCES = [tokens(length, seed=length) for length in (90, 1, 150, 2, 64, 33)]


def encoder(model: str, dtype: torch.dtype = BF16) -> DecoderLayout:
    return layout_of(model, dtype, BITS.get(model, ()))


def part_of(runner: Runner, ids: list[int]) -> Part:
    """A prompt whose second half is a second text, where it has more than a few tokens."""
    return Part(0, ids, runner.blocks(len(ids)), len(ids) // 2 if len(ids) > 2 else 0)


@pytest.mark.parametrize("dtype", [BF16, F32, F16])
@pytest.mark.parametrize("model", ENCODER_MODELS)
def test_an_encoder_is_computed_as_the_reference_does(model, dtype):
    check(encoder(model, dtype), dtype, chunks=())


def test_two_texts_are_told_apart_as_the_reference_does():
    layout, ids = encoder("bert", F32), SEQUENCES[0]
    runner = Runner(layout)
    found = {at: runner.step(Part(0, ids, runner.blocks(len(ids)), at))[0] for at in (0, 1, 45, len(ids) - 1)}
    runner.close()
    for at, logits in found.items():
        exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids), second_start=at)
        assert (logits - exact).abs().max() <= 1e-5 * exact.abs().max()
        assert at == 0 or (found[0] - exact).abs().max() > 1e-2 * exact.abs().max()


def alone(layout: DecoderLayout, **settings: object) -> list[Tensor]:
    runner = Runner(layout, **settings)
    runner.fill(torch.nan)
    found = [runner.step(part_of(runner, ids))[0] for ids in SEQUENCES]
    runner.close()
    return found


def together(layout: DecoderLayout, **settings: object) -> list[Tensor]:
    """In one step, the last sequence first."""
    runner = Runner(layout, **settings)
    runner.fill(torch.nan)
    found = runner.step(*(part_of(runner, ids) for ids in reversed(SEQUENCES)))
    runner.close()
    return found[::-1]


def all_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(same_bits(a, b) and bool(a.isfinite().all()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("model", BITS)
def test_bits_are_the_same_in_any_company_blocks_and_threads(model, dtype):
    layout = encoder(model, dtype)
    expected = alone(layout, name="avx2")
    for block_size, threads in ((16, 1), (32, 3), (48, 2)):
        assert all_same(together(layout, block_size=block_size, threads=threads), expected), block_size
        assert all_same(alone(layout, block_size=block_size, threads=threads), expected), block_size


@pytest.mark.parametrize("model", BITS)
def test_instruction_classes(model):
    for dtype in (BF16, F32):
        layout = encoder(model, dtype)
        expected = alone(layout, name="avx2")
        for name in other_classes(dtype):
            library_or_skip(name)
            assert all_same(together(layout, name=name), expected), name


@pytest.mark.parametrize("model", BITS)
def test_rows_that_are_wanted_have_the_bits_that_they_have_among_all(model):
    layout = encoder(model)
    expected = alone(layout)
    runner = Runner(layout, threads=2)
    parts = [part_of(runner, ids) for ids in SEQUENCES]
    starts = [sum(map(len, SEQUENCES[:number])) for number in range(len(SEQUENCES))]
    assert same_bits(runner.some(starts, *parts), torch.stack([logits[0] for logits in expected]))
    assert same_bits(runner.some([starts[2] + 7, starts[2] + 8], *parts), expected[2][7:9])
    runner.close()


@pytest.mark.parametrize("model", BITS)
def test_long_prompts_are_cut_into_parts_alike(model):
    """The first token alone, whose context threads part among them."""
    layout, ids = encoder(model, F32), tokens(2200)
    runner = Runner(layout, num_blocks=80)
    whole = runner.run(ids)
    runner.close()
    runner = Runner(layout, num_blocks=80, threads=4)
    assert same_bits(runner.some([0, 2199], Part(0, ids, runner.blocks(2200))), whole[[0, 2199]])
    runner.close()
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))
    error, size = (x.square().mean(1).sqrt().median() for x in (whole - exact, exact))
    assert error <= 1e-5 * size
