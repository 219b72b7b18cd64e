"""What prompt lookup guesses, against a search by brute force, and what it keeps."""

import random

import pytest

from holdfast.worker.scheduler.drafters import NgramProposer
from holdfast.worker.scheduler.sequence import Sequence
from tests.worker.schedulers import make_request


def sequence_of(token_ids, sequence_id=0):
    request = make_request(f"r{sequence_id}", prompt=tuple(token_ids))
    return Sequence(sequence_id, request, max_model_len=1000, eos_token_ids=frozenset())


def guess(token_ids, num_tokens=4, shortest=2, longest=3):
    return NgramProposer(shortest, longest).propose(sequence_of(token_ids), num_tokens)


def test_it_says_what_came_last_time():
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == (4, 5, 6, 7)


def test_the_longest_match_counts_before_the_most_recent():
    assert guess([1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3], num_tokens=1) == (9,)


def test_of_several_matches_the_most_recent_counts():
    assert guess([2, 3, 9, 0, 2, 3, 7, 0, 2, 3], num_tokens=2) == (7, 0)


def test_new_tokens_and_matches_that_are_too_short_say_nothing():
    assert guess([1, 2, 3, 4, 5]) == ()
    assert guess([1, 2, 3, 9, 3]) == ()
    assert guess([5]) == ()


def test_a_pattern_goes_on_over_its_own_end():
    assert guess([1, 2, 1, 2, 1], num_tokens=5) == (2, 1, 2, 1, 2)
    assert guess([7, 7, 7], num_tokens=4) == (7, 7, 7, 7)


@pytest.mark.parametrize("seed", range(20))
def test_growing_step_by_step_finds_what_a_search_finds(seed):
    rng = random.Random(seed)
    sequence, proposer = sequence_of([rng.randrange(3) for _ in range(5)]), NgramProposer(1, 4)
    for _ in range(40):
        found = proposer.propose(sequence, 1)
        assert found == searched(sequence.token_ids, range(4, 0, -1))
        sequence.token_ids += [rng.randrange(3) for _ in range(rng.randint(1, 4))]


def searched(token_ids, lengths):
    for length in lengths:
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                return (token_ids[end],)
    return ()


def test_a_step_reads_only_what_is_new(monkeypatch):
    sequence, proposer = sequence_of(range(500)), NgramProposer(2, 4)
    proposer.propose(sequence, 4)
    places = proposer._tables[0]._places
    before = len(places)
    sequence.token_ids.append(1000)
    proposer.propose(sequence, 4)
    assert len(places) == before + 3


def test_sequences_do_not_see_each_other_and_leave_nothing():
    proposer = NgramProposer(2, 3)
    first, second = sequence_of([1, 2, 3, 1, 2], 0), sequence_of([1, 2], 1)
    assert proposer.propose(first, 2) == (3, 1)
    assert proposer.propose(second, 2) == ()
    for sequence in (first, second, sequence_of([1], 2)):
        proposer.forget(sequence)
    assert not proposer._tables
