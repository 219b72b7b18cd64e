"""Attacks on simulated routers: what each of the real cores holds, a router without it does not."""

from collections.abc import Callable

import pytest

from holdfast.cluster.simulate.actors import costly_message, router_apis
from holdfast.cluster.simulate.world.attacks import (
    CLASSES,
    CRASHES,
    HANGS,
    LARGE_FIELDS,
    MANY_BYTES,
    OUT_OF_MEMORY,
    RESETS,
    TOKEN_LISTS,
)
from holdfast.cluster.simulate.world.scenario import draw_scenario
from holdfast.cluster.simulate.world.world import simulate
from holdfast.router.overload.byte_ledger import ByteLedger
from holdfast.router.overload.overload import Overload
from holdfast.router.requests.poison_watch import PoisonWatch, Reading
from holdfast.router.requests.reading_journal import LeftJournal
from holdfast.router.security.connection_budgets import ConnectionBudgets
from holdfast.router.wire import bounds
from holdfast.worker.replica.hang_verdict import HangVerdict
from holdfast.worker.request import PoisonRisk
from holdfast.worker.wire import message_bounds
from holdfast.worker.wire.bound import Bound
from holdfast.worker.wire.message_bounds import Bounds

UNBOUNDED = Bound(count=2**40)
SEEDS = {
    LARGE_FIELDS: 394,
    TOKEN_LISTS: 218,
    MANY_BYTES: 17,
    RESETS: 227,
    CRASHES: 325,
    HANGS: 2591,
    OUT_OF_MEMORY: 87,
}

VERY_LARGE_FIELDS = 787
"""A seed whose messages take a loop more than five seconds each, if all of them is built there."""
BEYOND_THE_COUNT = 63
"""A seed of token lists that are longer than their bound."""

Plant = Callable[[pytest.MonkeyPatch], None]


def leave_logit_bias_without_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    of_list = bounds._of_list
    monkeypatch.setattr(
        bounds, "_of_list", lambda name, limits: UNBOUNDED if name == "logit_bias" else of_list(name, limits)
    )


def leave_token_ids_without_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    public = bounds.public_bounds

    def unbounded(limits: object) -> Bounds:
        return {**public(limits), "holdfast.v1.TokenIds": {"ids": UNBOUNDED}}

    monkeypatch.setattr(bounds, "public_bounds", unbounded)


def build_whatever_comes_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_logit_bias_without_a_count(monkeypatch)
    monkeypatch.setattr(message_bounds, "MAX_FIELDS", 2**40)
    monkeypatch.setattr(costly_message, "BIAS_ENTRY_S", 6e-6)  # on a slower machine
    monkeypatch.setattr(router_apis, "INLINE_BYTES", 2**40)


def decode_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_apis, "INLINE_BYTES", 2**40)


def count_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is taken all the same."""
    monkeypatch.setattr(ByteLedger, "_check", lambda *args: None)


def cut_nobody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionBudgets, "reset", lambda self, connection, now: None)


def charge_nobody_knows_whom_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionBudgets, "suspects", lambda self, now: False)


def forget_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither journals nor clients are believed."""
    monkeypatch.setattr(PoisonWatch, "note", lambda self, losses: None)
    monkeypatch.setattr(Reading, "suspect", lambda self, num_lost: None)


def prove_nothing_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a journal are not on trial, and one loss after the other is taken for the first."""
    monkeypatch.setattr(Reading, "suspect", lambda self, num_lost: None)
    monkeypatch.setattr(router_apis, "LeftJournal", _OfUnknownRouter)


class _OfUnknownRouter(LeftJournal):
    def losses(self, router: str, monotonic_s: float, now_s: float):
        return super().losses("a router", monotonic_s, now_s)

    def entries(self):
        for entry in super().entries():
            yield type(entry)(digest=entry.digest, poison_risk=PoisonRisk.NONE)


def overlook_hangs_in_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeftJournal, "note_end", lambda self, monotonic_s: None)


def read_what_a_router_that_ends_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_apis.RouterApis, "_is_read_elsewhere", lambda self, digest, silent_s: False)


@pytest.mark.parametrize("kind", SEEDS)
def test_a_seed_of_each_kind_keeps_every_promise(kind):
    drawn = draw_scenario(SEEDS[kind])
    assert drawn.is_calm, "nothing else may break it"
    assert drawn.attack.kind == kind, "seeds are drawn otherwise now: choose another seed of this kind"
    assert simulate(SEEDS[kind]).failure is None


@pytest.mark.parametrize(
    ("kind", "plant", "broken"),
    [
        (LARGE_FIELDS, leave_logit_bias_without_a_count, "one message took"),
        pytest.param(TOKEN_LISTS, leave_token_ids_without_a_count, "one message took", marks=pytest.mark.slow),
        (TOKEN_LISTS, decode_on_the_loop, "streams paused for"),
        (MANY_BYTES, count_no_bytes, "ended"),
        (RESETS, cut_nobody_off, "routers looked at"),
        pytest.param(RESETS, charge_nobody_knows_whom_for_ever, "routers looked at", marks=pytest.mark.slow),
        (CRASHES, forget_losses, "ended"),
        pytest.param(CRASHES, prove_nothing_by_a_trial, "ended", marks=pytest.mark.slow),
        (HANGS, overlook_hangs_in_journals, "ended 2 processes"),
        pytest.param(HANGS, read_what_a_router_that_ends_still_holds, "ended 2 processes", marks=pytest.mark.slow),
        pytest.param(OUT_OF_MEMORY, forget_losses, "ended", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_planted_bug_breaks_a_promise(kind: str, plant: Plant, broken: str, monkeypatch):
    plant(monkeypatch)
    seed = BEYOND_THE_COUNT if plant is leave_token_ids_without_a_count else SEEDS[kind]
    failure = simulate(seed).failure
    assert failure is not None
    assert not isinstance(failure.error, TypeError | AttributeError), "it is the planting that failed"
    assert kind in str(failure.error), failure
    assert broken in str(failure.error), failure


@pytest.mark.slow  # a planted fault
def test_a_router_that_builds_whatever_comes_is_slow_and_is_not_taken_for_one_that_hangs(monkeypatch):
    """Its streams pause, and it sheds what comes new; its supervisor knows that it computes on input."""
    build_whatever_comes_on_the_loop(monkeypatch)
    shed = _counted(monkeypatch)
    assert simulate(VERY_LARGE_FIELDS).tally.num_hung == 0
    assert shed, "a loop that is so late sheds"
    monkeypatch.setattr(HangVerdict, "_is_busy", False)
    assert simulate(VERY_LARGE_FIELDS).tally.num_hung > 0


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shed: list[str] = []
    refused = Overload._refused

    def counted(self: Overload, action: str, message: str) -> object:
        shed.append(str(action))
        return refused(self, action, message)

    monkeypatch.setattr(Overload, "_refused", counted)
    return shed


@pytest.mark.slow
def test_every_class_of_attack_is_drawn():
    drawn = {scenario.attack.kind for seed in range(200) if (scenario := draw_scenario(seed)).attack is not None}
    assert drawn == set(CLASSES)
