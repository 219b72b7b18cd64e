"""What the suffix corpus guesses, how large it gets, and from whom it learns."""

from holdfast.worker.scheduler.drafters import ContinuationCounts, SuffixProposer
from holdfast.worker.scheduler.sequence import Sequence
from tests.worker.schedulers import make_request


def sequence_of(prompt, output=(), sequence_id=0, salt=""):
    request = make_request(f"r{sequence_id}", prompt=tuple(prompt), outputs=tuple(output), salt=salt)
    return Sequence(sequence_id, request, max_model_len=1000, eos_token_ids=frozenset())


def taught(*outputs, max_corpus_tokens=1000, salt=""):
    proposer = SuffixProposer(max_corpus_tokens)
    for output in outputs:
        proposer.forget(sequence_of([0], output, salt=salt))
    return proposer


def test_it_knows_what_earlier_outputs_said():
    proposer = taught([10, 11, 12, 13, 14, 15])
    assert proposer.propose(sequence_of([99, 11, 12]), 8) == (13, 14, 15)


def test_it_knows_the_request_itself():
    assert SuffixProposer(0).propose(sequence_of([1, 2, 3, 4, 1, 2]), 3) == (3, 4, 1)


def test_what_came_most_often_is_said_and_unlikely_words_end_it():
    proposer = taught([1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4])
    assert proposer.propose(sequence_of([9, 1, 2]), 1) == (3,)
    many = taught(*([1, 2, token_id] for token_id in range(20, 30)))
    assert many.propose(sequence_of([9, 1, 2]), 4) == ()


def test_the_longest_known_context_decides():
    proposer = taught([5, 1, 2, 8], [6, 1, 2, 7], [6, 1, 2, 7])
    assert proposer.propose(sequence_of([9, 5, 1, 2]), 1) == (8,)


def test_the_corpus_is_bounded_and_forgets_the_oldest_first():
    proposer = taught(*([number, number + 1, number + 2] for number in range(0, 500, 5)), max_corpus_tokens=40)
    assert proposer._num_corpus_tokens <= 40
    assert proposer.propose(sequence_of([0, 1]), 1) == ()
    assert proposer.propose(sequence_of([495, 496]), 1) == (497,)
    assert sum(map(len, proposer._corpora.values())) < 200


def test_an_output_longer_than_the_corpus_is_cut():
    proposer = taught(range(100, 200), max_corpus_tokens=10)
    assert proposer.propose(sequence_of([197, 198]), 1) == (199,)
    assert proposer.propose(sequence_of([150, 151]), 1) == ()


def test_requests_with_another_salt_learn_nothing():
    proposer = taught([10, 11, 12, 13], salt="tenant")
    assert proposer.propose(sequence_of([10, 11]), 2) == ()
    assert proposer.propose(sequence_of([10, 11], sequence_id=1, salt="tenant"), 2) == (12, 13)


def test_an_ended_sequence_leaves_its_output_and_no_state():
    proposer = SuffixProposer(100)
    sequence = sequence_of([1, 2, 3])
    proposer.propose(sequence, 2)
    proposer.forget(sequence)
    assert not proposer._own
    assert not proposer._corpora, "it had no output"


def test_what_is_added_and_removed_leaves_nothing():
    counts = ContinuationCounts()
    counts.add([1, 2, 3, 1, 2, 3, 1, 2])
    counts.add([1, 2, 4])
    counts.remove([1, 2, 3, 1, 2, 3, 1, 2])
    assert counts.after((1, 2)) == {4: 1}
    counts.remove([1, 2, 4])
    assert len(counts) == 0
