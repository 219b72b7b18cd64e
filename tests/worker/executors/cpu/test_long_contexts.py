"""Contexts that are cut into parts of 1024 keys: by one thread or by many, the bits are the same."""

import pytest
import torch

from holdfast.worker.models.reference import Reference
from tests.worker.executors.cpu.native import BF16, F32, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.steps import Part

CASES = {
    "full": ("llama", ()),
    "window across a cut": ("gemma2", (("sliding_window", 1500),)),
    "window within a part": ("mistral", (("sliding_window", 100),)),
    "sinks": ("gpt_oss", (("sliding_window", 700),)),
}
NUM_TOKENS = 2200


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_merged_alike_by_one_thread_and_by_many(case, dtype):
    model, changes = CASES[case]
    layout, ids = layout_of(model, dtype, changes), tokens(NUM_TOKENS)
    serial = Runner(layout, num_blocks=80)
    one_piece = serial.run(ids)
    serial.close()
    # From these places on a few tokens are decoded; the others are a prompt in large chunks.
    for threads, name in ((4, None), (2, "avx2")):
        runner = Runner(layout, name=name, threads=threads, num_blocks=80)
        blocks = runner.blocks(len(ids))
        for first, end in ((0, 1020), (1020, 1030), (1030, 2040), (2040, 2052), (2052, NUM_TOKENS)):
            size = 1 if end - first < 20 else 500
            for at in range(first, end, size):
                (logits,) = runner.step(Part(at, ids[at : min(at + size, end)], blocks))
                assert same_bits(logits, one_piece[at : min(at + size, end)]), (threads, at)
        runner.close()


def test_a_long_and_a_short_context_in_one_step():
    layout, ids, short = layout_of("llama"), tokens(1100), tokens(20, seed=1)
    runner = Runner(layout, threads=4)
    long_blocks, short_blocks = runner.blocks(1200), runner.blocks(32)
    expected = runner.run(ids, (), long_blocks), runner.run(short, (), short_blocks)
    for first, end in ((1050, 1051), (1051, 1055)):
        logits = runner.step(Part(first, ids[first:end], long_blocks), Part(10, short[10:13], short_blocks))
        assert same_bits(logits[0], expected[0][first:end])
        assert same_bits(logits[1], expected[1][10:13])
    runner.close()


def test_a_long_context_is_near_the_exact_one():
    layout, ids = layout_of("gpt_oss", F32, (("sliding_window", 700),)), tokens(1300)
    runner = Runner(layout, threads=2)
    logits = runner.run(ids, (600,))[-50:]
    runner.close()
    exact = Reference(layout, dtype=torch.float64).run_model(torch.tensor(ids))[-50:]
    error, size = (x.square().mean(1).sqrt().median() for x in (logits - exact, exact))
    assert error <= 1e-5 * size


@pytest.mark.slow
def test_all_classes_on_a_long_context():
    layout, ids = layout_of("gemma2", BF16, (("sliding_window", 1500),)), tokens(NUM_TOKENS)
    results = []
    for name in ("avx2", *other_classes()):
        runner = Runner(layout, name=name, num_blocks=80)
        results.append(runner.run(ids, (400, 1)))
        runner.close()
    assert all(same_bits(result, results[0]) for result in results)
