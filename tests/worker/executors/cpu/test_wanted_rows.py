"""The last layer of a step computes the rows that are wanted alone, with the bits that they have among all."""

import pytest
import torch

from tests.worker.executors.cpu.native import BF16, F16, F32, library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_bits import CASES
from tests.worker.executors.steps import Part

SEQUENCES = [tokens(length, seed=length) for length in (90, 45, 33, 70)]
STEPS = ((20, 1, 0, 0), (40, 0, 33, 1), (1, 43, 0, 66), (29, 1, 0, 3))
"""Tokens of each sequence in each step: prompts, chunks after others, decodes."""

WANTED = {
    "the last of each": lambda counts: [sum(counts[: i + 1]) - 1 for i, count in enumerate(counts) if count],
    "none": lambda counts: [],
    "the first": lambda counts: [0],
    "all but the first": lambda counts: list(range(1, sum(counts))),
    "runs over the ends of sequences": lambda counts: [row for row in range(sum(counts)) if row % 23 > 8],
    "backwards": lambda counts: list(range(sum(counts) - 1, -1, -3)),
    "one twice": lambda counts: [0, 0],
}


def logits_of_steps(runner, wanted=None):
    """The logits of the rows that are wanted of each step, or of all."""
    blocks = [runner.blocks(len(ids)) for ids in SEQUENCES]
    done, found = [0] * len(SEQUENCES), []
    for counts in STEPS:
        parts = [
            Part(first, ids[first : first + count], own)
            for first, count, ids, own in zip(done, counts, SEQUENCES, blocks, strict=True)
            if count
        ]
        rows = range(sum(counts)) if wanted is None else wanted(counts)
        found.append(runner.some(rows, *parts))
        done = [first + count for first, count in zip(done, counts, strict=True)]
    return found


def check(layout, wanted, **settings):
    """In all steps but the last some rows are wanted; its rows see what the others have left in the cache."""
    runner = Runner(layout, **settings)
    runner.fill(torch.nan)
    everything = logits_of_steps(runner)
    runner.close()
    runner = Runner(layout, **settings)
    runner.fill(torch.nan)
    found = logits_of_steps(runner, lambda counts: range(sum(counts)) if counts == STEPS[-1] else wanted(counts))
    runner.close()
    for counts, some, every in zip(STEPS[:-1], found, everything, strict=False):
        assert same_bits(some, every[wanted(counts)]), counts
    assert same_bits(found[-1], everything[-1])
    assert everything[-1].isfinite().all()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if number % 2 else ()) for number, case in enumerate(CASES)]
)
def test_rows_have_the_bits_that_they_have_among_all(case):
    model, changes = CASES[case]
    layout = layout_of(model, BF16, changes)
    for number, wanted in enumerate(WANTED.values()):
        check(layout, wanted, threads=(1, 3)[number % 2], block_size=(16, 32, 48)[number % 3])


@pytest.mark.parametrize("dtype", [F16, F32])
def test_the_plain_dtypes(dtype):
    for wanted in WANTED.values():
        check(layout_of("gemma2", dtype), wanted, threads=2, block_size=16)


@pytest.mark.parametrize("name", other_classes())
def test_instruction_classes(name):
    library_or_skip(name)
    check(layout_of("llama"), WANTED["runs over the ends of sequences"], name=name)


def test_a_token_is_chosen_without_logits():
    ids = tokens(100)
    runner = Runner(layout_of("llama"))
    blocks = runner.blocks(len(ids))
    every, last = runner.chosen(ids, blocks), runner.chosen(ids, blocks, wanted=[70, 99])
    runner.close()
    assert last == [every[70], every[99]]


@pytest.mark.parametrize("length", [1500, 2100])
def test_long_contexts_whose_keys_are_parted(length):
    """One row after more keys than a part of attention has."""
    ids = tokens(length)
    runner = Runner(layout_of("llama"), threads=2, num_blocks=128)
    blocks = runner.blocks(length)
    *_, one = runner.some([length - 1], Part(0, ids, blocks))
    every = runner.step(Part(0, ids, blocks))[0]
    runner.close()
    assert same_bits(one, every[-1])
