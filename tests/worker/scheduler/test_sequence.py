"""What one sequence knows of itself: how much is left to compute, what to draw next, and when it ends."""

import pytest

from holdfast.worker.request import EngineRequest, FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import ScheduledSequence

EOS = 0


def make_sequence(prompt=(5, 6, 7), outputs=(), sequence_id=0, priority=Priority.NORMAL, max_model_len=100, **params):
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        priority=priority,
        sampling_params=SamplingParams(**{"seed": 9, "max_tokens": 10, **params}),
    )
    return Sequence(sequence_id, request, max_model_len=max_model_len, eos_token_ids=frozenset({EOS}))


def scheduled(first_position, token_ids, num_draws):
    return ScheduledSequence(
        sequence_id=0,
        first_position=first_position,
        token_ids=token_ids,
        block_ids=(0,),
        draw=None,
        num_draws=num_draws,
    )


def test_a_new_sequence_has_its_whole_prompt_to_compute():
    sequence = make_sequence()
    assert (sequence.num_uncomputed_tokens, sequence.num_output_tokens) == (3, 0)
    assert sequence.finish_reason is None


def test_a_continued_sequence_has_its_outputs_to_compute_and_draws_the_next_index():
    sequence = make_sequence(outputs=(8, 9), temperature=0.5, top_k=4, top_p=0.9)
    draw = sequence.draw_params()
    assert sequence.num_uncomputed_tokens == 5
    assert (draw.seed, draw.first_output_index) == (9, 2)
    assert draw.sampling is sequence.request.sampling_params


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "max_len"),
    [(10, 100, 13), (10, 8, 8), (None, 50, 50)],
    ids=["as asked for", "clamped to the context", "all that the context holds"],
)
def test_the_longest_length(max_tokens, max_model_len, max_len):
    sequence = make_sequence(max_tokens=max_tokens, max_model_len=max_model_len)
    assert (sequence.max_len, sequence.max_num_slots) == (max_len, max_len - 1)


def test_priority_goes_before_arrival():
    older, newer = make_sequence(sequence_id=1), make_sequence(sequence_id=2)
    urgent = make_sequence(sequence_id=3, priority=Priority.HIGH)
    assert urgent.service_order < older.service_order < newer.service_order


@pytest.mark.parametrize(
    ("outputs", "params", "reason"),
    [
        ((8,), {}, None),
        ((8, EOS), {}, FinishReason.STOP),
        ((8, EOS), {"ignore_eos": True}, None),
        ((8, 42), {"stop_token_ids": [42]}, FinishReason.STOP),
        ((8, 42), {"stop_token_ids": [42], "ignore_eos": True}, FinishReason.STOP),
        ((8, 9), {"max_tokens": 2}, FinishReason.LENGTH),
        ((8, EOS), {"max_tokens": 2}, FinishReason.STOP),
        ((8, 9), {"max_model_len": 5}, FinishReason.LENGTH),
    ],
)
def test_when_it_ends(outputs, params, reason):
    assert make_sequence(outputs=outputs, **params).finish_reason is reason


def test_a_stop_token_at_the_end_of_the_prompt_ends_nothing():
    assert make_sequence(prompt=(5, EOS)).finish_reason is None


def test_a_chunk_that_draws_nothing_only_advances():
    sequence = make_sequence()
    assert sequence.advance(scheduled(0, (5, 6), 0), ()) == ()
    assert (sequence.token_ids, sequence.num_computed_tokens) == ([5, 6, 7], 2)


def test_a_drawn_token_is_left_to_compute():
    sequence = make_sequence()
    assert sequence.advance(scheduled(0, (5, 6, 7), 1), (8,)) == (8,)
    assert (sequence.token_ids, sequence.num_uncomputed_tokens) == ([5, 6, 7, 8], 1)


@pytest.mark.parametrize(
    ("drafts", "drawn", "gained"),
    [
        ((8, 9), (8, 9, 10), (8, 9, 10)),
        ((8, 9), (8, 11, 10), (8, 11)),
        ((8, 9), (12, 9, 10), (12,)),
        ((8, EOS), (8, EOS, 10), (8, EOS)),
        ((8, 9), (8, 42, 10), (8, 42)),
    ],
    ids=["all right", "second wrong", "first wrong", "cut at end of sequence", "draw in place of a draft stops it"],
)
def test_drafts_are_kept_as_far_as_the_draws_agree(drafts, drawn, gained):
    sequence = make_sequence(stop_token_ids=[42])
    sequence.num_computed_tokens = 2
    assert sequence.advance(scheduled(2, (7, *drafts), 3), drawn) == gained
    assert sequence.token_ids == [5, 6, 7, *gained]
    assert sequence.num_uncomputed_tokens == 1, "positions computed for dropped tokens are taken back"


def test_draws_beyond_the_longest_length_are_cut():
    sequence = make_sequence(max_tokens=2)
    sequence.num_computed_tokens = 2
    assert sequence.advance(scheduled(2, (7, 8, 9), 3), (8, 9, 10)) == (8, 9)
    assert sequence.finish_reason is FinishReason.LENGTH
