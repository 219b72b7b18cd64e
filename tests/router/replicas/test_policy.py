"""Power of two choices and the longest prefix, with the draws scripted."""

import random
from collections import Counter
from dataclasses import dataclass

from holdfast.router.replicas.policy import (
    MAX_LEAD,
    TOKENS_PER_SEQUENCE,
    load_score,
    longest_prefix,
    power_of_two_choices,
)
from holdfast.worker.request import EngineLoad


@dataclass(frozen=True)
class FakeReplica:
    name: str
    score: float


def load(num_running: int = 0, num_waiting: int = 0, num_waiting_tokens: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_waiting_tokens=num_waiting_tokens,
        num_free_blocks=0,
        num_total_blocks=0,
    )


def test_the_emptier_of_two_is_chosen_whichever_is_drawn_first():
    replicas = [FakeReplica("full", 5), FakeReplica("empty", 1)]
    for first in (0, 1):
        draws = [0, first]
        assert power_of_two_choices(replicas, lambda n, draws=draws: draws.pop()).name == "empty"


def test_only_two_are_looked_at():
    replicas = [FakeReplica("a", 3), FakeReplica("b", 2), FakeReplica("emptiest", 0)]
    draws = iter([0, 0])
    assert power_of_two_choices(replicas, lambda n: next(draws)).name == "b"


def test_the_two_are_always_different_and_every_pair_is_drawn():
    replicas = [FakeReplica(str(index), score=index) for index in range(4)]
    draw = random.Random(1).randrange
    chosen = Counter(power_of_two_choices(replicas, draw).name for _ in range(6000))
    assert chosen["3"] == 0, "the fullest loses against any other"
    assert 2700 < chosen["0"] < 3300, "the emptiest wins in the half of all pairs that it is in"


def test_a_single_replica_needs_no_draw():
    assert power_of_two_choices([FakeReplica("only", 9)], lambda n: 1 // 0).name == "only"


def test_equal_loads_are_spread():
    replicas = [FakeReplica("a", 0), FakeReplica("b", 0)]
    draw = random.Random(2).randrange
    chosen = Counter(power_of_two_choices(replicas, draw).name for _ in range(1000))
    assert 400 < chosen["a"] < 600


def test_score_counts_what_was_sent_since_the_report():
    assert load_score(load(num_running=2, num_waiting=1), num_sent=3) == 6


def test_score_counts_prompt_tokens_as_sequences():
    waiting = load(num_waiting=1, num_waiting_tokens=TOKENS_PER_SEQUENCE)
    assert load_score(waiting, num_sent_tokens=TOKENS_PER_SEQUENCE) == 3


def test_a_report_that_crossed_a_submission_does_not_hide_it():
    assert load_score(load(), num_open=4) == 4


def test_the_longest_prefix_wins_up_to_a_lead_that_grows_with_what_it_saves():
    for num_cached in (16, 2 * TOKENS_PER_SEQUENCE):
        bound = 1 + MAX_LEAD + num_cached / TOKENS_PER_SEQUENCE
        for score, name in ((bound, "holder"), (bound + 0.01, "empty")):
            replicas = [FakeReplica("holder", score), FakeReplica("empty", 1)]
            assert longest_prefix(replicas, [num_cached, 0], lambda n: 0).name == name


def test_among_equal_prefixes_the_emptier_wins_and_without_any_two_are_drawn():
    replicas = [FakeReplica("a", 3), FakeReplica("b", 2), FakeReplica("emptiest", 0)]
    assert longest_prefix(replicas, [32, 32, 16], lambda n: 0).name == "b"
    draws = iter([0, 0])
    assert longest_prefix(replicas, [0, 0, 0], lambda n: next(draws)).name == "b", "the third is not drawn"
