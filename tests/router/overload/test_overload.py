"""The overload manager: actions begin in order, each at its own pressure, and end below it; what is refused."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.config import OverloadConfig
from holdfast.router.overload.byte_ledger import ByteLedger
from holdfast.router.overload.overload import (
    CLOSE_EVERY_S,
    LOOP_DELAY_AVERAGED_S,
    RETRY_S,
    LoopDelay,
    Overload,
    OverloadAction,
    Readings,
    Resource,
)
from holdfast.worker.errors import ByteBudgetError, OverloadedError
from holdfast.worker.request import Priority

CONFIG = OverloadConfig(max_router_bytes=2**28, max_open_requests=100)
MEMORY = 10**9
ORDER = tuple(OverloadAction)
EVERY_S = 0.25


def made() -> Overload:
    return Overload(CONFIG, ByteLedger(CONFIG), MEMORY)


def at(overload: Overload, memory: float = 0.0, now: float = 0.0, **readings: int) -> tuple[OverloadAction, ...]:
    """The actions that are on at a pressure of memory."""
    overload.observe(Readings(resident_bytes=round(memory * MEMORY), **readings), now)
    return tuple(overload.active)


def test_actions_begin_in_order_and_end_below_their_beginnings():
    overload = made()
    beginnings = [(0.69, 0), (0.71, 1), (0.81, 2), (0.86, 3), (0.93, 4), (0.98, 5), (1.0, 6)]
    for pressure, number in beginnings:
        assert at(overload, pressure) == ORDER[:number], pressure
    ends = [(0.91, 6), (0.89, 5), (0.86, 4), (0.81, 3), (0.74, 2), (0.69, 1), (0.61, 1), (0.59, 0)]
    for pressure, number in ends:
        assert at(overload, pressure) == ORDER[:number], pressure


@given(st.lists(st.floats(0, 1.5), max_size=30))
def test_a_later_action_is_never_on_without_the_earlier_ones(pressures):
    overload = made()
    for pressure in pressures:
        active = at(overload, pressure)
        assert active == ORDER[: len(active)]


@pytest.mark.parametrize("resource", list(Resource))
def test_each_resource_begins_what_helps_it(resource):
    overload = made()
    if resource is Resource.LOOP_DELAY:
        overload.note_loop(0.0, EVERY_S)
        overload.observe(Readings(), 100.0)
    readings = {Resource.BYTES: "held_bytes", Resource.REQUESTS: "num_open", Resource.MEMORY: "resident_bytes"}
    if resource in readings:
        overload.observe(Readings(**{readings[resource]: 10**10}), 0.0)
    closes = resource in (Resource.MEMORY, Resource.BYTES)
    assert (OverloadAction.CLOSE_GREEDIEST in overload.active) == closes
    assert (OverloadAction.SHRINK_HEAP in overload.active) == (resource is Resource.MEMORY)
    assert overload.active[OverloadAction.SHED_NEW] is resource
    assert f"{resource}" in overload.warnings[0]


def _is_refused(overload: Overload, priority: Priority, *, now: float = 0.0, **kind: bool) -> bool:
    try:
        overload.check_new(priority, **({"is_resumed": False} | kind), now=now)
    except OverloadedError as error:
        return error.retry_after_s == RETRY_S
    return False


def test_low_is_refused_before_all_new_ones_and_these_before_resumed_ones():
    overload = made()
    seen = []
    for pressure in (0.5, 0.81, 0.86, 0.93, 1.0):
        at(overload, pressure)
        seen.append(
            (
                not overload.takes_connection(),
                _is_refused(overload, Priority.CRITICAL, is_guest=True),
                _is_refused(overload, Priority.LOW),
                _is_refused(overload, Priority.CRITICAL),
                _is_refused(overload, Priority.LOW, is_resumed=True),
            )
        )
    assert seen == [
        (False, False, False, False, False),
        (True, True, False, False, False),
        (True, True, True, False, False),
        (True, True, True, True, False),
        (True, True, True, True, True),
    ]
    assert overload.counts == {
        OverloadAction.STOP_ACCEPTING: 2,
        OverloadAction.SHED_LOW: 1,
        OverloadAction.SHED_NEW: 6,
        OverloadAction.SHED_RESUMED: 1,
    }


def test_one_request_is_ended_at_a_time():
    overload = made()
    at(overload, 0.98)
    assert overload.must_close(10.0)
    error = overload.note_closed(12345, 10.0)
    assert isinstance(error, ByteBudgetError)
    assert "12345" in str(error)
    assert not overload.must_close(10.0 + CLOSE_EVERY_S / 2)
    assert overload.must_close(10.0 + CLOSE_EVERY_S)
    at(overload, 0.5)
    assert not overload.must_close(20.0)
    assert not overload.warnings


# --- the loop's delay ---


def _after(late_s: Sequence[float]) -> float:
    """The average after a timer was so late, time after time."""
    delay, now = LoopDelay(2.0), 100.0
    delay.note(now, EVERY_S)
    for one in late_s:
        now += EVERY_S + one
        delay.note(now, EVERY_S)
    return delay.at(now)


def test_a_stall_counts_by_its_length_and_what_lasts_counts_as_itself():
    assert _after([0.0] * 100) == 0.0
    assert _after([0.5]) < 0.2
    assert 0.3 < _after([1.0]) < 0.6
    assert _after([3.0]) > 1.5
    assert _after([0.3] * 100) == pytest.approx(0.3)
    assert _after([100.0]) == 2.0
    assert _after([100.0, *[0.0] * round(1.1 * LOOP_DELAY_AVERAGED_S / EVERY_S)]) < 0.75


def test_a_stall_is_noticed_by_the_first_request_after_it_and_not_only_by_the_timer():
    overload = made()
    overload.note_loop(0.0, EVERY_S)
    assert not _is_refused(overload, Priority.NORMAL, now=0.3)
    assert _is_refused(overload, Priority.NORMAL, now=4.0)


def test_settings_out_of_order_are_refused():
    order = ("shrink_heap_at", "stop_accepting_at", "shed_low_at", "shed_new_at", "close_greediest_at")
    for first, second in pairwise(order):
        with pytest.raises(ValueError, match=rf"{first} = 0\.9.*{second} = 0\.8"):
            OverloadConfig(**{name: 0.9 if name == first else 0.8 for name in order})
    with pytest.raises(ValueError, match="max_connection_bytes"):
        OverloadConfig(max_connection_bytes=2**28, max_key_bytes=2**20)
