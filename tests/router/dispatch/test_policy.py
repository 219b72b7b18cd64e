"""Each routing policy on snapshots made by hand, with the draws scripted or counted."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.dispatch.circuit_breaker import CircuitBreaker
from holdfast.router.dispatch.load_table import LoadTable
from holdfast.router.dispatch.policy import (
    CLOSED,
    COPY_COST,
    LOAD_BOUND,
    MAX_COPY_TOKENS,
    POLICIES,
    TOKENS_PER_SEQUENCE,
    UNKNOWN_TOKEN_S,
    HashRing,
    RoutingSnapshot,
    least_loaded,
    next_bit,
    power_of_two,
    prefix_aware,
    random_choice,
    round_robin,
    session_affinity,
)
from holdfast.router.dispatch.prefix_index import PrefixMatch
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.worker.request import EngineLoad
from tests.router.core import facts


def snapshot(*scores: float, draws=None, ring: HashRing | None = None, token_s=None, **fields) -> RoutingSnapshot:
    kept = [score for score in scores if score != CLOSED]
    return RoutingSnapshot(
        scores=scores,
        num_open=len(kept),
        total_score=sum(kept),
        token_s=token_s or [None] * len(scores),
        typical_token_s=fields.pop("typical_token_s", UNKNOWN_TOKEN_S),
        ring=ring or HashRing(),
        last=fields.pop("last", -1),
        random_index=scripted(draws) if draws is not None else random.Random(1).randrange,
        **fields,
    )


def scripted(draws: list[int]):
    left = iter(draws)
    return lambda n: next(left)


def load(num_running: int = 0, num_waiting: int = 0, num_waiting_tokens: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_waiting_tokens=num_waiting_tokens,
        num_free_blocks=0,
        num_total_blocks=0,
    )


@given(
    scores=st.lists(st.integers(0, 9) | st.just(CLOSED), min_size=1, max_size=9),
    seed=st.integers(0, 2**16),
    last=st.integers(-1, 8),
    session_id=st.sampled_from(["", "a", "b"]),
    masks=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2**9 - 1)), max_size=3),
)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_an_open_replica_and_the_same_again(name, scores, seed, last, session_id, masks):
    if all(score == CLOSED for score in scores):
        return
    ring = HashRing()
    for slot in range(len(scores)):
        ring.add(f"replica-{slot}", slot)
    held = tuple((16 * num, mask & (1 << len(scores)) - 1) for num, mask in sorted(masks, reverse=True))

    def chosen() -> int:
        return POLICIES[name](
            snapshot(
                *scores,
                draws=None,
                ring=ring,
                last=min(last, len(scores) - 1),
                session_id=session_id,
                num_prompt_tokens=200,
                prefix=PrefixMatch(held),
            )
        )

    assert scores[chosen()] != CLOSED
    assert chosen() == chosen()


def test_the_emptier_of_two_is_chosen_whichever_is_drawn_first():
    for first in (0, 1):
        assert power_of_two(snapshot(5, 1, draws=[first, 0])) == 1


def test_only_two_are_looked_at():
    assert power_of_two(snapshot(3, 2, 0, draws=[0, 0])) == 1


def test_the_two_are_always_different_and_every_pair_is_drawn():
    draws = random.Random(1).randrange
    scores = (0, 1, 2, 3)
    pairs = [RoutingSnapshot.draw_two(_with(snapshot(*scores), draws)) for _ in range(6000)]
    assert all(one != other for one, other in pairs)
    counts = Counter(frozenset(pair) for pair in pairs)
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


def test_of_few_open_ones_among_many_two_are_drawn():
    draws = random.Random(1).randrange
    scores = [CLOSED] * 400
    scores[17] = scores[230] = scores[399] = 1.0
    counts = Counter(frozenset(_with(snapshot(*scores), draws).draw_two()) for _ in range(600))
    assert counts.keys() == {frozenset({17, 230}), frozenset({17, 399}), frozenset({230, 399})}
    assert min(counts.values()) > 120


def _with(one: RoutingSnapshot, draws) -> RoutingSnapshot:
    return one._replace(random_index=draws)


def test_a_single_replica_is_taken_by_every_policy():
    for policy in POLICIES.values():
        assert policy(snapshot(CLOSED, 9, CLOSED)) == 1


def test_chance_looks_at_no_load():
    draws = random.Random(2).randrange
    counts = Counter(random_choice(_with(snapshot(0, 9, CLOSED, 0), draws)) for _ in range(900))
    assert counts.keys() == {0, 1, 3}
    assert min(counts.values()) > 240


def test_robin_goes_round_and_passes_by_what_is_closed():
    chosen, last = [], -1
    for _ in range(6):
        last = round_robin(snapshot(5, CLOSED, 0, 1, last=last))
        chosen.append(last)
    assert chosen == [0, 2, 3, 0, 2, 3]


def test_the_least_loaded_of_all_and_of_equal_ones_the_next_after_a_random_place():
    assert least_loaded(snapshot(3, 1, 2, draws=[2])) == 1
    assert [least_loaded(snapshot(1, 0, CLOSED, 0, draws=[start])) for start in range(4)] == [1, 1, 3, 3]


def replica_with(message: EngineLoad) -> ReplicaState:
    return ReplicaState(facts("r"), message, CircuitBreaker(), LoadTable(has_ring=False), max_waiting=99)


def test_score_counts_what_was_sent_since_the_report():
    replica = replica_with(load(num_running=2, num_waiting=1))
    for attempt in (1, 2, 3):
        replica.note_sent(attempt, 0)
    assert replica.score == 6


def test_score_counts_prompt_tokens_as_sequences():
    replica = replica_with(load(num_waiting=1, num_waiting_tokens=TOKENS_PER_SEQUENCE))
    replica.note_sent(1, TOKENS_PER_SEQUENCE)
    assert replica.score == 4


def test_a_report_that_crossed_a_submission_does_not_hide_it():
    replica = replica_with(load())
    for attempt in (1, 2, 3, 4):
        replica.note_sent(attempt, 0)
    replica.note_report(load())
    assert replica.score == 4


# --- prefix-aware ---


def test_the_longest_prefix_wins_up_to_a_lead_that_grows_with_what_it_saves():
    for num_cached in (16, 2 * TOKENS_PER_SEQUENCE, 16 * TOKENS_PER_SEQUENCE):
        bound = 1 + (min(COPY_COST * num_cached, MAX_COPY_TOKENS) + num_cached) / TOKENS_PER_SEQUENCE
        for score, chosen in ((bound, 0), (bound + 0.01, 1)):
            prefix = PrefixMatch(((num_cached, 0b01),))
            one = snapshot(score, 1, prefix=prefix, num_prompt_tokens=num_cached + 1, draws=[0] * 9)
            assert prefix_aware(one) == chosen


def test_a_slow_replica_keeps_a_prefix_only_while_it_has_the_prompt_computed_sooner():
    prefix = PrefixMatch(((256, 0b01),))
    for slowness, chosen in ((1, 0), (20, 1)):
        speeds = [slowness * 1e-4, 1e-4]
        one = snapshot(1, 0, prefix=prefix, num_prompt_tokens=1000, token_s=speeds, draws=[0] * 9)
        assert prefix_aware(one) == chosen, "1 * 256 + 744 tokens against 1000 and a copy"


def test_the_less_loaded_holder_and_the_next_shorter_prefix_where_all_holders_of_the_longest_are_closed():
    prefix = PrefixMatch(((640, 0b0011), (320, 0b0111)))
    assert prefix_aware(snapshot(3, 2, 0, 0, prefix=prefix, num_prompt_tokens=641)) in (0, 1)
    assert prefix_aware(snapshot(CLOSED, CLOSED, 4, 4, prefix=prefix, num_prompt_tokens=641)) == 2


def test_a_resident_adapter_wins_up_to_a_lead_of_its_load_and_a_copy():
    prefix = PrefixMatch(residents=0b01)
    bound = 1 + 2 * 0.3 / (TOKENS_PER_SEQUENCE * 1e-3)
    for score, chosen in ((bound - 0.01, 0), (bound + 0.01, 1)):
        one = snapshot(
            score, 1, prefix=prefix, num_prompt_tokens=10, adapter_s=0.3, typical_token_s=1e-3, draws=[0] * 9
        )
        assert prefix_aware(one) == chosen


def test_of_a_prefix_and_an_adapter_in_two_replicas_the_one_that_saves_more():
    for num_cached, chosen in ((400, 2), (200, 1)):
        prefix = PrefixMatch(((num_cached, 0b100),), residents=0b010)
        one = snapshot(
            0, 0, 0, prefix=prefix, num_prompt_tokens=500, adapter_s=0.3, typical_token_s=1e-3, draws=[0] * 9
        )
        assert prefix_aware(one) == chosen, f"{num_cached} tokens of 1 ms against a load of 300 ms"


def test_an_adapter_that_is_nowhere_changes_nothing():
    for scores, chosen in (((2, 1), 1), ((1, 2), 0)):
        assert prefix_aware(snapshot(*scores, prefix=PrefixMatch(residents=0), draws=[0, 0])) == chosen


@pytest.mark.parametrize("token_s", [[1e-4, None], [None, 1e-4], [None, None], [1e-4, 1e-4]])
def test_a_replica_without_a_measured_speed_is_taken_to_be_as_fast_as_the_others(token_s):
    for scores, chosen in (((2, 1), 1), ((1, 2), 0)):
        one = snapshot(*scores, token_s=token_s, typical_token_s=1e-4, num_prompt_tokens=10, draws=[0, 0])
        assert prefix_aware(one) == chosen


def test_without_a_prefix_the_one_of_two_that_computes_the_prompt_sooner():
    assert prefix_aware(snapshot(1, 1, token_s=[1e-4, 1e-5], num_prompt_tokens=10, draws=[0, 0])) == 1


@given(mask=st.integers(1, 2**40), start=st.integers(0, 45))
def test_next_bits_go_round(mask, start):
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    assert next_bit(mask, start) == next((bit for bit in bits if bit >= start), bits[0])


# --- session affinity ---


def ring_of(*names: str) -> HashRing:
    ring = HashRing()
    for slot, name in enumerate(names):
        ring.add(name, slot)
    return ring


def test_a_session_stays_where_it_is_while_others_come_and_go():
    names = [f"replica-{number}" for number in range(8)]
    sessions = [f"session-{number}" for number in range(500)]

    def homes(ring: HashRing) -> list[int]:
        return [session_affinity(snapshot(*[0] * 8, ring=ring, session_id=session)) for session in sessions]

    ring = ring_of(*names)
    before = homes(ring)
    ring.remove(3)
    after = homes(ring)
    assert all(now == then for now, then in zip(after, before, strict=True) if then != 3)
    assert 3 not in after
    ring.add(names[3], 3)
    assert homes(ring) == before
    assert max(Counter(before).values()) < 2 * 500 / 8


def test_no_replica_gets_more_than_its_bounded_share():
    """All requests of one session: the ring alone would send them to one replica."""
    ring, scores = ring_of("a", "b", "c", "d"), [0.0] * 4
    for _ in range(100):
        scores[session_affinity(snapshot(*scores, ring=ring, session_id="hot"))] += 1
    assert max(scores) <= LOAD_BOUND * 100 / 4 + 1
    assert sorted(scores)[0] > 0


def test_requests_without_a_session_are_balanced():
    assert session_affinity(snapshot(5, 1, draws=[0, 0])) == 1
