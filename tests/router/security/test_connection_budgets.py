"""Budgets of connections on a clock of the test's: who charges what, who is cut off, and who is not."""

from dataclasses import dataclass

import pytest

from holdfast.router.security.connection_budgets import (
    MIN_PRUNED,
    SUSPECT_S,
    ClientConnection,
    ConnectionBudgets,
    Peer,
    Reason,
)


@dataclass
class Limits:
    max_resets_per_s: float = 10.0
    max_unauthenticated_calls_per_s: float = 10.0
    max_unauthenticated_connections: int = 3


def connection(port: int = 1, host: str = "10.0.0.1", since: float = 0.0) -> ClientConnection:
    return ClientConnection(Peer(host, port), since)


def charged(budgets: ConnectionBudgets, one: ClientConnection, number: int, now: float) -> list[Reason]:
    """What comes of so many calls that are reset."""
    found = []
    for _ in range(number):
        budgets.call(one, has_key=True, now=now)
        found.append(budgets.reset(one, now))
    return [reason for reason in found if reason is not None]


def test_ten_seconds_of_resets_may_come_at_once_and_no_more():
    budgets, one = ConnectionBudgets(Limits(), asks_for_keys=True), connection()
    assert charged(budgets, one, 100, 0.0) == []
    assert charged(budgets, one, 1, 0.0) == [Reason.RESETS]
    assert charged(budgets, one, 10, 1.0) == []  # ten a second come back
    assert charged(budgets, one, 1, 1.0) == [Reason.RESETS]


def test_connections_of_one_address_share_its_budget_and_those_of_others_have_theirs():
    budgets = ConnectionBudgets(Limits(), asks_for_keys=True)
    assert charged(budgets, connection(1), 100, 0.0) == []
    assert charged(budgets, connection(2), 1, 0.0) == [Reason.RESETS]
    assert charged(budgets, connection(1, "10.0.0.2"), 100, 0.0) == []
    assert charged(budgets, connection(1, "2001:db8::1"), 100, 0.0) == []
    assert charged(budgets, connection(1, "2001:db8::ffff:2"), 1, 0.0) == [Reason.RESETS]  # of the same network
    assert charged(budgets, connection(1, "2001:db8:0:1::1"), 1, 0.0) == []


def test_a_connection_most_of_whose_calls_are_not_reset_stays():
    budgets, proxy = ConnectionBudgets(Limits(max_resets_per_s=0.1), asks_for_keys=True), connection()
    for _ in range(5_000):
        for _ in range(3):
            budgets.call(proxy, has_key=True, now=0.0)
        assert budgets.reset(proxy, 0.0) is None
    for _ in range(5_000):  # it is judged by its latest calls
        budgets.call(proxy, has_key=True, now=0.0)
        if budgets.reset(proxy, 0.0) is Reason.RESETS:
            return
    raise AssertionError("it is never cut off")


def test_calls_without_a_key_charge_their_address_until_a_key_is_presented():
    budgets, stranger, known = ConnectionBudgets(Limits(), asks_for_keys=True), connection(1), connection(2)
    assert [budgets.call(stranger, has_key=False, now=0.0) for _ in range(100)] == [None] * 100
    assert budgets.call(stranger, has_key=False, now=0.0) is Reason.CALLS_WITHOUT_KEY
    assert [budgets.call(known, has_key=True, now=0.0) for _ in range(1000)] == [None] * 1000
    assert (stranger.is_known, known.is_known) == (False, True)


def test_without_keys_no_call_is_charged():
    budgets, one = ConnectionBudgets(Limits(), asks_for_keys=False), connection()
    assert [budgets.call(one, has_key=False, now=0.0) for _ in range(1000)] == [None] * 1000
    assert budgets.overdue([connection(port) for port in range(10)]) == []


def test_connections_are_told_apart_while_too_many_calls_are_reset_by_nobody_knows_whom():
    budgets = ConnectionBudgets(Limits(), asks_for_keys=True)
    for _ in range(100):
        budgets.reset(None, 0.0)
    assert not budgets.suspects(0.0)
    budgets.reset(None, 0.0)
    assert budgets.suspects(0.0)
    assert budgets.suspects(SUSPECT_S - 0.1)
    assert not budgets.suspects(SUSPECT_S)


def test_of_too_many_connections_without_a_key_the_oldest_go():
    budgets = ConnectionBudgets(Limits(max_unauthenticated_connections=2), asks_for_keys=True)
    strangers = [connection(port, since=-port) for port in range(5)]
    assert budgets.overdue(strangers) == [strangers[4], strangers[3], strangers[2]]
    assert budgets.overdue(strangers[:2]) == []


@pytest.mark.parametrize("number", [10 * MIN_PRUNED])
def test_addresses_whose_budgets_are_full_again_are_forgotten(number):
    budgets = ConnectionBudgets(Limits(), asks_for_keys=True)
    for turn in range(number):
        one = connection(1, f"10.1.{turn // 256}.{turn % 256}")
        budgets.call(one, has_key=False, now=float(turn))
    assert len(budgets._buckets) <= MIN_PRUNED
