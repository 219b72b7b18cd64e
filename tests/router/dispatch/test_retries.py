"""How fast lost requests are sent again, and which replicas get none."""

import pytest

from holdfast.router.dispatch.circuit_breaker import (
    FIRST_REST_S,
    MAX_REST_S,
    MEMORY_S,
    NUM_FAILURES_TO_REST,
    CircuitBreaker,
)


def failed(num_failures: int) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(num_failures):
        breaker.note_failure(100.0)
    return breaker


@pytest.mark.parametrize(
    ("num_failures", "rest_s"),
    [
        (NUM_FAILURES_TO_REST - 1, None),
        (NUM_FAILURES_TO_REST, FIRST_REST_S),
        (NUM_FAILURES_TO_REST + 2, 4 * FIRST_REST_S),
        (NUM_FAILURES_TO_REST + 50, MAX_REST_S),
    ],
)
def test_each_failure_in_a_row_makes_the_rest_longer(num_failures, rest_s):
    assert failed(num_failures).rests_until == (None if rest_s is None else 100.0 + rest_s)


def test_after_a_rest_one_attempt_at_a_time_until_one_comes_to_a_token():
    breaker = failed(NUM_FAILURES_TO_REST)
    breaker.end_rest(100.9)
    assert breaker.rests_until == 101.0
    breaker.end_rest(101.0)
    assert breaker.rests_until is None
    breaker.note_sent(101.0)
    assert breaker.rests_until == 102.0
    breaker.note_success()
    breaker.note_sent(101.5)
    assert breaker.rests_until is None


def test_a_success_in_between_begins_the_count_again():
    breaker = failed(NUM_FAILURES_TO_REST - 1)
    breaker.note_success()
    breaker.note_failure(100.0)
    assert breaker.rests_until is None


def test_failures_are_remembered_for_a_while():
    assert CircuitBreaker().is_forgotten(0.0)
    breaker = failed(1)
    assert not breaker.is_forgotten(100.0 + MEMORY_S)
    assert breaker.is_forgotten(100.1 + MEMORY_S)
