"""Suspects of several routers on one replica: each router hears of the others', and trials are kept apart."""

import pytest

from holdfast.worker.engine.request_guards import Suspects
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, FinishReason, PoisonRisk, TokenDelta
from tests.router.core import NO_LOAD

NONE, SUSPECT, ON_TRIAL = PoisonRisk


def step(attempt: str, index: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(attempt=attempt, first_token_index=index, token_ids=(1,), finish_reason=finish)


def num_told(suspects: Suspects[str], owner: str | None) -> int:
    return suspects.load_for(owner, NO_LOAD).num_foreign_suspects


def test_each_router_hears_of_the_suspects_of_others():
    suspects: Suspects[str] = Suspects()
    suspects.add("a/1", SUSPECT, "a")
    suspects.add("a/2", SUSPECT, "a")
    suspects.add("b/1", SUSPECT, "b")
    suspects.add("c/1", NONE, "c")
    assert [num_told(suspects, owner) for owner in ("a", "b", "c", None)] == [1, 2, 3, 3]


def test_only_new_suspects_are_news():
    suspects: Suspects[str] = Suspects()
    suspects.add("a/1", NONE, "a")
    assert not suspects.has_news
    suspects.add("a/2", SUSPECT, "a")
    assert suspects.has_news


def test_a_suspect_that_gets_on_is_one_no_longer():
    suspects: Suspects[str] = Suspects()
    suspects.add("a/1", SUSPECT, "a")
    for index in range(NUM_STEPS_TO_CLEAR):
        assert num_told(suspects, "b") == 1
        suspects.note([step("a/1", index)])
    assert num_told(suspects, "b") == 0
    suspects.note([step("a/1", NUM_STEPS_TO_CLEAR, FinishReason.LENGTH)])


def test_a_suspect_that_ends_is_gone():
    suspects: Suspects[str] = Suspects()
    suspects.add("a/1", SUSPECT, "a")
    suspects.add("a/2", SUSPECT, "a")
    suspects.note([step("a/1", finish=FinishReason.ABORT)])
    suspects.drop("a/2")
    assert num_told(suspects, "b") == 0


@pytest.mark.parametrize(
    ("there", "comes", "is_refused"),
    [
        (SUSPECT, NONE, False),
        (SUSPECT, SUSPECT, False),
        (SUSPECT, ON_TRIAL, True),
        (ON_TRIAL, NONE, False),
        (ON_TRIAL, SUSPECT, True),
        (ON_TRIAL, ON_TRIAL, True),
    ],
)
def test_a_trial_and_suspects_of_other_routers_are_kept_apart(there, comes, is_refused):
    suspects: Suspects[str] = Suspects()
    suspects.add("a/1", there, "a")
    suspects.check(comes, "a")
    if is_refused:
        with pytest.raises(QueueFullError):
            suspects.check(comes, "b")
    else:
        suspects.check(comes, "b")
