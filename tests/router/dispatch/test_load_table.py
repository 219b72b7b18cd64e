"""The load table's sums are those of its loads, slots are used again, and unmeasured speeds are those of the others."""

import pytest

from holdfast.router.dispatch.load_table import LoadTable
from holdfast.router.dispatch.policy import CLOSED, UNKNOWN_TOKEN_S


@pytest.fixture
def table() -> LoadTable:
    return LoadTable(has_ring=True)


def speeds(table: LoadTable) -> tuple[list[float | None], float]:
    shown = table.snapshot(lambda n: 0, 1)
    return list(shown.token_s), shown.typical_token_s


def test_a_slot_is_closed_until_its_load_is_set_and_after_its_replica_is_gone(table: LoadTable):
    first, second = table.add("a"), table.add("b")
    assert table.scores == [CLOSED, CLOSED]
    table.set_score(first, 2.5)
    table.set_score(second, 1.0)
    table.set_score(first, 0.5)
    assert (table.num_open, table.total_score) == (2, 1.5)
    table.remove(first)
    assert (table.num_open, table.total_score, table.scores[first]) == (1, 1.0, CLOSED)
    assert list(table.ring.walk("any")) == [second]
    assert table.add("c") == first
    table.check_integrity()


def test_speeds_are_those_that_replicas_have_measured(table: LoadTable):
    table.add("a")
    table.add("b")
    assert speeds(table) == ([None, None], UNKNOWN_TOKEN_S)
    table.set_speed(0, 2000.0)
    assert speeds(table) == ([1 / 2000, None], 1 / 2000)
    table.set_speed(1, 500.0)
    assert speeds(table) == ([1 / 2000, 1 / 500], 1 / 500)
    table.remove(0)
    table.add("c")
    assert speeds(table) == ([None, 1 / 500], 1 / 500), "a new replica in an old slot has no past"
