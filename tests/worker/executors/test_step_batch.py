"""A plan packed and unpacked says the same thing."""

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.step_plan import (
    BlockCopy,
    BlockTables,
    DecodeColumns,
    DecodeRows,
    PromptLogprobParams,
    ScheduledSequence,
    StepPlan,
    draws_of,
)
from tests.draw_params import draw_params

DRAW = draw_params(seed=1, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)


@st.composite
def sequences(draw):
    first_position = draw(st.integers(0, 100))
    token_ids = tuple(draw(st.lists(st.integers(0, 2**18), min_size=1, max_size=20)))
    num_draws = draw(st.integers(0, len(token_ids)))
    block_size = draw(st.sampled_from([1, 16]))
    num_blocks = -(-(first_position + len(token_ids)) // block_size)
    first_block = draw(st.integers(0, 1000))
    first_row = draw(st.integers(0, len(token_ids) - 1))
    num_logprobs_told = draw(st.integers(0, len(token_ids) - first_row))
    params = PromptLogprobParams(first_row=first_row, token_ids=(9,) * num_logprobs_told, num_logprobs=3)
    return ScheduledSequence(
        sequence_id=draw(st.integers(0, 2**40)),
        first_position=first_position,
        token_ids=token_ids,
        block_ids=tuple(range(first_block, first_block + num_blocks)),
        draw=DRAW if num_draws else None,
        num_draws=num_draws,
        prompt_logprobs=params if num_logprobs_told else None,
    )


copies = st.builds(
    BlockCopy, source=st.integers(0, 1000), destination=st.integers(0, 1000), num_tokens=st.integers(1, 63)
)


@given(st.lists(sequences(), min_size=1, max_size=8), st.integers(0, 2**62), st.lists(copies, max_size=3))
def test_unpacking_gives_back_what_was_packed(scheduled, step_id, copies):
    plan = StepPlan(step_id=step_id, others=tuple(scheduled), block_copies=tuple(copies))
    packed = StepBatch.of(plan).packed()
    assert packed.dtype == np.int64
    assert packed[0] == len(scheduled) >= 1
    batch = StepBatch.unpack(packed)
    assert batch.step_id == step_id
    assert batch.token_ids.tolist() == [token for s in scheduled for token in s.token_ids]
    assert batch.positions.tolist() == [s.first_position + i for s in scheduled for i in range(len(s.token_ids))]
    assert batch.first_positions.tolist() == [s.first_position for s in scheduled]
    assert batch.num_tokens.tolist() == [len(s.token_ids) for s in scheduled]
    assert batch.num_draws.tolist() == [s.num_draws for s in scheduled]
    assert batch.block_ids.tolist() == [block for s in scheduled for block in s.block_ids]
    assert batch.num_blocks.tolist() == [len(s.block_ids) for s in scheduled]
    assert batch.block_copies.T.tolist() == [[c.source, c.destination, c.num_tokens] for c in copies]


@given(st.lists(sequences(), min_size=1, max_size=8))
def test_logits_rows_are_the_last_rows_of_each_sequence_and_then_those_that_rate(scheduled):
    batch = StepBatch.of(StepPlan(step_id=0, others=tuple(scheduled)))
    expected, of_prompt, start = [], [], 0
    for sequence in scheduled:
        rows = range(start, start + len(sequence.token_ids))
        expected += rows[len(rows) - sequence.num_draws :]
        if sequence.prompt_logprobs is not None:
            of_prompt += rows[sequence.prompt_logprobs.first_row :][: len(sequence.prompt_logprobs.token_ids)]
        start = rows.stop
    assert batch.logits_rows.tolist() == expected + of_prompt


@given(st.lists(sequences(), max_size=4), st.lists(st.integers(0, 200), max_size=8), st.integers(0, 100))
def test_rows_are_packed_as_shares_of_their_own_would_be(others, firsts, age):
    if not others and not firsts:
        return
    tables = [tuple(range(first, first + 1 + (first + age) // 16)) for first in firsts]
    rows = DecodeRows(
        DecodeColumns(range(len(firsts)), firsts, firsts, [DRAW] * len(firsts)),
        age,
        [first % 7 for first in firsts],
        BlockTables(tables, [array("q", table) for table in tables]),
    )
    plan = StepPlan(step_id=9, decodes=rows, others=others)
    alone = StepPlan(step_id=9, others=plan.sequences)
    assert plan.num_tokens == alone.num_tokens
    assert draws_of(plan) == draws_of(alone)
    assert StepBatch.of(plan).packed().tolist() == StepBatch.of(alone).packed().tolist()


def test_blocks_are_found_by_sequence_and_index():
    plan = StepPlan(
        step_id=0,
        others=tuple(
            ScheduledSequence(sequence_id=i, first_position=0, token_ids=(1,), block_ids=blocks, draw=None)
            for i, blocks in enumerate([(7, 8), (3,), (5, 4, 9)])
        ),
    )
    batch = StepBatch.of(plan)
    assert batch.blocks_of(np.array([2, 0, 1, 2]), np.array([2, 1, 0, 0])).tolist() == [9, 8, 3, 5]
