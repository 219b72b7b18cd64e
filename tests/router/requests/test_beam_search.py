"""The search without a model: against a search that remembers everything, and its rules one by one."""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from holdfast.router.requests.beam_search import Beam, BeamSearch

END = 0
Model = Callable[[tuple[int, ...]], list[float]]


def random_model(seed: int, vocab_size: int) -> Model:
    """Log-probabilities of every token after a prefix: a function of both."""

    def logprobs(prefix: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((seed, prefix)))
        weights = [rng.random() ** 3 + 1e-3 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def searched(model: Model, width: int, max_tokens: int, penalty: float = 1.0, end=(END,)) -> BeamSearch:
    search = BeamSearch(width=width, length_penalty=penalty, max_tokens=max_tokens, end_token_ids=end)
    while search.live:
        search.advance([ranked(model(beam.token_ids))[: search.num_candidates] for beam in search.live])
    return search


def ranked(logprobs: list[float]) -> list[tuple[int, float]]:
    return sorted(enumerate(logprobs), key=lambda item: (-item[1], item[0]))


def all_sequences(model: Model, vocab_size: int, max_tokens: int) -> dict[tuple[int, ...], float]:
    """Every sequence that ends or is full, and its log-probability."""
    found, prefixes = {}, {(): 0.0}
    for length in range(1, max_tokens + 1):
        longer = {
            (*prefix, token): logprob + model(prefix)[token]
            for prefix, logprob in prefixes.items()
            for token in range(vocab_size)
        }
        over = {tokens: value for tokens, value in longer.items() if tokens[-1] == END or length == max_tokens}
        found |= over
        prefixes = {tokens: value for tokens, value in longer.items() if tokens not in over}
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_as_wide_as_the_tree_finds_the_best_sequence_of_all(seed):
    """Without a length penalty a live beam never comes to score better, so stopping early loses nothing."""
    model = random_model(seed, 4)
    every = all_sequences(model, 4, 4)
    best = sorted(every, key=lambda tokens: -every[tokens])[:3]
    beams = searched(model, 300, 4, penalty=0.0).best(3)
    assert [beam.token_ids for beam in beams] == best
    assert [beam.logprob for beam in beams] == pytest.approx([every[tokens] for tokens in best])


def test_one_beam_is_greedy():
    model = random_model(1, 9)
    greedy: tuple[int, ...] = ()
    for _ in range(6):
        greedy += (ranked(model(greedy))[0][0],)
    assert searched(model, 1, 6, end=()).best(1)[0].token_ids == greedy


def test_a_length_penalty_changes_which_length_wins():
    """Ending at once has probability 0.4; two tokens more have 0.36 in all, at less loss a token."""

    def model(prefix: tuple[int, ...]) -> list[float]:
        return [math.log(0.4), math.log(0.6)]

    assert searched(model, 2, 2, penalty=0.0).best(1)[0].token_ids == (END,)
    assert searched(model, 2, 2, penalty=2.0).best(1)[0].token_ids == (1, 1)


def test_equal_candidates_keep_the_order_of_beams_and_tokens():
    search = BeamSearch(width=2, length_penalty=1.0, max_tokens=3, end_token_ids=())
    search.advance([[(7, -1.0), (3, -1.0), (5, -1.0), (4, -1.0)]])
    assert [beam.token_ids for beam in search.live] == [(3,), (4,)]
    search.advance([[(2, -1.0), (9, -1.0)], [(1, -1.0), (8, -1.0)]])
    assert [beam.token_ids for beam in search.live] == [(3, 2), (3, 9)]


def test_an_end_among_the_runners_up_is_no_end_and_leaves_the_live_beams_full():
    search = BeamSearch(width=2, length_penalty=1.0, max_tokens=9, end_token_ids=(END,))
    search.advance([[(1, -0.1), (2, -0.2), (END, -0.3), (3, -0.4)]])
    assert search.best(2) == ()
    assert [beam.token_ids for beam in search.live] == [(1,), (2,)]
    search.advance([[(END, -0.1), (4, -0.5), (5, -9.0)], [(END, -0.1), (6, -0.6)]])
    assert [beam.token_ids for beam in search.best(2)] == [(1, END), (2, END)]
    assert all(beam.has_ended for beam in search.best(2))


def test_a_search_ends_when_no_live_beam_can_beat_the_worst_finished_one():
    search = BeamSearch(width=1, length_penalty=1.0, max_tokens=100, end_token_ids=(END,))
    search.advance([[(END, -0.1), (1, -5.0)]])
    assert search.live == ()
    search = BeamSearch(width=1, length_penalty=1.0, max_tokens=100, end_token_ids=(END,))
    search.advance([[(1, -0.1), (END, -5.0)]])
    assert search.live == (Beam(token_ids=(1,), logprob=-0.1),)


def test_a_live_beam_between_the_best_and_the_worst_finished_one_goes_on():
    search = BeamSearch(width=2, length_penalty=0.0, max_tokens=100, end_token_ids=(END,))
    search.advance([[(END, -0.1), (1, -0.2), (2, -9.0)]])
    search.advance([[(END, -3.0), (3, -0.3)], [(END, -1.0), (4, -1.0)]])
    assert [beam.logprob for beam in search.best(2)] == pytest.approx([-0.1, -3.2])
    assert [beam.token_ids for beam in search.live] == [(1, 3), (2, 4)]


def test_ends_among_the_best_leave_enough_candidates_to_go_on_with():
    search = BeamSearch(width=2, length_penalty=1.0, max_tokens=9, end_token_ids=(END,))
    search.advance([[(END, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)]])
    assert [beam.token_ids for beam in search.live] == [(1,), (2,)]


def test_the_same_candidates_give_the_same_beams_whatever_order_they_come_in():
    model = random_model(3, 6)
    results = []
    for permutation in itertools.islice(itertools.permutations(range(6)), 0, 720, 240):
        search = BeamSearch(width=3, length_penalty=0.7, max_tokens=5, end_token_ids=(END,))
        while search.live:
            search.advance([[(t, model(beam.token_ids)[t]) for t in permutation] for beam in search.live])
        results.append(search.best(3))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 3


def test_a_beam_knows_what_each_of_its_tokens_was_chosen_from():
    search = BeamSearch(width=2, length_penalty=1.0, max_tokens=2, end_token_ids=(END,))
    first, second = [(1, -0.1), (2, -0.2)], [[(3, -0.1), (4, -9.0)], [(5, -0.1), (6, -9.0)]]
    assert search.live[0].candidates == []
    search.advance([first])
    search.advance(second)
    found = search.best(2)
    assert [beam.token_ids for beam in found] == [(1, 3), (2, 5)]
    assert [beam.candidates for beam in found] == [[first, second[0]], [first, second[1]]]
