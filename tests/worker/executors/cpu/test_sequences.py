"""Sequences keep to themselves: whatever else is in a step, in their blocks' memory, or in another's numbers."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from holdfast.worker.errors import ReplicaError
from holdfast.worker.step_plan import BlockCopy
from tests.worker.executors.cpu.native import BF16, F16, F32, lets_odd_weights_pass, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.steps import Part

CASES = ("llama", "gemma2", "glm4_moe_lite", "gpt_oss", "mixtral")
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 66, 90, 128, 140)
CHUNKS = ((1,), (5, 1), (64,), (2, 30, 1), (17,))


def alone(layout, ids, **settings):
    runner = Runner(layout, **settings)
    logits = runner.run(ids)
    runner.close()
    return logits


def together(runner, sequences, starts):
    """Sequences begin in different steps and go on in chunks of different sizes until all are done."""
    blocks = [runner.blocks(len(ids)) for ids in sequences]
    done, rows = [0] * len(sequences), [[] for _ in sequences]
    for step in count():
        parts = {}
        for number, ids in enumerate(sequences):
            size = CHUNKS[number % len(CHUNKS)][step % len(CHUNKS[number % len(CHUNKS)])]
            if step >= starts[number] and done[number] < len(ids):
                parts[number] = Part(done[number], ids[done[number] : done[number] + size], blocks[number])
        if not parts and step > max(starts):
            return [torch.cat(each) for each in rows]
        if parts:
            for number, logits in zip(parts, runner.step(*parts.values()), strict=True):
                rows[number].append(logits)
                done[number] += len(logits)


@pytest.mark.in_turn
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", CASES)
def test_a_step_of_many_sequences(model, threads):
    layout = layout_of(model)
    sequences = [tokens(length, seed=length) for length in LENGTHS]
    runner = Runner(layout, threads=threads, block_size=16, num_blocks=128)
    runner.fill(torch.nan)
    results = together(runner, sequences, starts=[number % 5 for number in range(len(sequences))])
    runner.close()
    for ids, logits in zip(sequences, results, strict=True):
        assert same_bits(logits, alone(layout, ids)), len(ids)


@pytest.mark.in_turn
@pytest.mark.parametrize("model", ["gemma2", "glm4_moe_lite"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_dirty_memory_does_not_matter(model, dtype, block_size):
    layout, ids = layout_of(model, dtype), tokens(100)
    clean = alone(layout, ids)
    for dirt in (torch.nan, torch.inf, 1e4):
        runner = Runner(layout, block_size=block_size)
        runner.fill(dirt)
        for chunks in ((), (1,), (9, 40)):
            assert same_bits(runner.run(ids, chunks), clean), (dirt, chunks)
        runner.close()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_nan_in_one_sequence_stays_there(dtype, monkeypatch):
    lets_odd_weights_pass(monkeypatch)
    layout = layout_of("llama", dtype)
    ids, others = [tokens(70, seed) for seed in (1, 2)]
    ids, broken = [id_ if id_ != 5 else 6 for id_ in ids], [*others[:10], 5, *others[10:]]
    clean = alone(layout, ids)
    embedding = layout.embedding.clone()
    embedding[5] = torch.nan
    runner = Runner(replace(layout, embedding=embedding), block_size=16)
    mine, of_broken = runner.blocks(len(ids)), runner.blocks(len(broken))
    for first in range(0, len(ids), 7):
        parts = (Part(first, broken[first : first + 7], of_broken), Part(first, ids[first : first + 7], mine))
        other, logits = runner.step(*parts)
        assert same_bits(logits, clean[first : first + 7])
    assert other.isnan().all()  # every token after the broken one sees it
    assert runner.chosen(broken, of_broken)[-1] == -1
    assert same_bits(runner.run(ids, (20,), of_broken), clean)  # who takes over its blocks sees nothing of it
    runner.close()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_nan_is_not_taken_for_a_number(softcap, monkeypatch):
    lets_odd_weights_pass(monkeypatch)
    layout = layout_of("gemma2")
    embedding = layout.embedding.clone()
    embedding[5] = torch.nan
    runner = Runner(replace(layout, embedding=embedding, logit_softcap=softcap))
    ids = [7, 8, 5, 9]
    assert runner.run(ids, chunks=(2,)).isnan().all(1).tolist() == [False, False, True, True]
    assert runner.chosen(ids, runner.blocks(4))[2:] == [-1, -1]
    runner.close()


@pytest.mark.in_turn
@pytest.mark.parametrize("model", ["glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_a_copied_block_is_as_if_computed(model, dtype, block_size):
    """Sequences that share a beginning: the block in which they part is copied up to there, over dirty memory."""
    layout = layout_of(model, dtype)
    ids = tokens(60)
    for shared in (1, 15, 17, 33, 47, 50):
        other = [*ids[:shared], *tokens(30, seed=shared)]
        runner = Runner(layout, block_size=block_size)
        runner.fill(torch.nan)
        first = runner.blocks(len(ids))
        runner.run(ids, (), first)
        kept = shared // block_size
        second = [*first[:kept], *runner.blocks(len(other))][: -(-len(other) // block_size)]
        copies = (
            [BlockCopy(source=first[kept], destination=second[kept], num_tokens=shared % block_size)]
            if shared % block_size
            else []
        )
        (rest,) = runner.step(Part(shared, other[shared:], second), copies=copies)
        runner.close()
        assert same_bits(rest, alone(layout, other)[shared:]), shared


def test_blocks_are_copied_all_at_once():
    """A block that is a source and a destination in one step is read before it is written."""
    layout = layout_of("llama")
    ids, others = tokens(32), tokens(32, seed=9)
    runner = Runner(layout, block_size=32)
    one, two = runner.blocks(32), runner.blocks(32)
    runner.step(Part(0, ids, one), Part(0, others, two))
    parts = (Part(20, ids[20:], two), Part(25, others[25:], one))
    copies = [
        BlockCopy(source=one[0], destination=two[0], num_tokens=20),
        BlockCopy(source=two[0], destination=one[0], num_tokens=25),
    ]
    first, second = runner.step(*parts, copies=copies)
    runner.close()
    assert same_bits(first, alone(layout, ids)[20:])
    assert same_bits(second, alone(layout, others)[25:])


def test_a_cleared_cache_is_zeros():
    layout = layout_of("llama")
    runner = Runner(layout)
    blocks = runner.blocks(40)
    runner.run(tokens(40), (), blocks)
    runner.cache.clear(torch.tensor(blocks))
    assert all(not layer.pages[blocks].any() for layer in runner.cache._layers)
    runner.close()


@pytest.mark.parametrize("token_id", [126, 2**31, 2**40, -1])
def test_a_token_beyond_the_vocabulary_is_an_error_and_no_read_beyond_the_embedding(token_id):
    runner = Runner(layout_of("llama"))
    blocks = runner.blocks(8)
    with pytest.raises(ReplicaError, match="beyond the vocabulary of 126"):
        runner.step(Part(0, [5, token_id, 6], blocks))
    assert runner.step(Part(0, [5, 125, 6], blocks))[0].isfinite().all()
    runner.close()
