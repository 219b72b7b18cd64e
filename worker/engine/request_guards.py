"""NaN and infinity in logits: the error that such a request gets, and when the replica may be at fault.

A request that makes the model overflow does so on every replica: it fails, and the others go on. Corrupt weights or
memory are the replica's fault and affect every request: the replica ends, and its requests continue on others. The
known-answer check tells which of the two it is (`worker/replica/known_answer.py`); several failing client requests
alone do not prove a fault of the replica.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Generic, Protocol, TypeVar

from holdfast.worker.errors import InternalError, QueueFullError, ReplicaError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, EngineLoad, PoisonRisk, TokenDelta
from holdfast.worker.scheduler.acceptance import DroppedRequest
from holdfast.worker.step_update import StepListener

NUM_ALONE_TO_DOUBT: Final = 3
"""Failures in a row, each of a request alone in its step with no token drawn for anyone in between, that cast doubt on
the replica."""


class NumbersCheck(StepListener, Protocol):
    """Check that decides whether the replica is well. A listener of the engine, whose own requests are its
    questions.
    """

    def ask_in_doubt(self) -> bool:
        """Checks at once. False: the result is unknown. Otherwise the engine settles the request or fails."""


class NonFiniteGuard:
    """Counts the requests of a replica whose logits were NaN or infinite, step by step."""

    def __init__(self) -> None:
        self.in_a_row: list[Hashable] = []
        """Failures in a row. Read-only."""
        self.in_doubt: list[Hashable] = []
        """Attempts without finite logits, which fail if the replica turns out to be well."""

    def judge(
        self,
        broken: Sequence[DroppedRequest],
        check: NumbersCheck | None,
        owners: Mapping[Hashable, StepListener],
        *,
        has_others: bool,
    ) -> list[Hashable]:
        """The attempts among `broken` that fail now; the others are in doubt until the `check` has its answer, whose
        own questions always fail. Raises `ReplicaError` where the replica may be at fault and no check answers.
        """
        doubt = self.note_step(broken, has_others=has_others)
        if doubt is None:
            return [one.attempt for one in broken]
        if check is None or not check.ask_in_doubt():
            raise doubt
        questions = [one.attempt for one in broken if owners[one.attempt] is check]
        self.in_doubt += [one.attempt for one in broken if one.attempt not in questions]
        return questions

    def note_step(self, broken: Sequence[DroppedRequest], *, has_others: bool) -> ReplicaError | None:
        """The `broken` requests got no token in this step; `has_others`: other requests did. The fault where the
        replica may be the cause: several requests ran and none had finite logits.
        """
        if has_others:
            self.in_a_row.clear()
            return None
        names: dict[Hashable, None] = {}
        for one in broken:
            names[one.request.group_id or one.request.key] = None
        for name in names:
            if name not in self.in_a_row:
                self.in_a_row.append(name)
        if len(names) <= 1 and len(self.in_a_row) < NUM_ALONE_TO_DOUBT:
            return None
        count = max(len(names), len(self.in_a_row))
        return ReplicaError(f"the model's logits are not finite (NaN or infinite) for any of {count} requests")

    def settle(self) -> None:
        """The replica has passed its check: earlier failures no longer count."""
        self.in_a_row.clear()

    def take_in_doubt(self) -> list[Hashable]:
        """Attempts that are cleared of doubt."""
        taken, self.in_doubt = self.in_doubt, []
        return taken


def no_numbers() -> InternalError:
    """The error that such a request gets."""
    return InternalError("the model's logits for this request are not finite (NaN or infinite), so no token can follow")


RETRY_S: Final = 0.05
"""When to ask again: a suspect is cleared within a few steps, or the replica is dead."""

Owner = TypeVar("Owner")


class Suspects(Generic[Owner]):
    """Suspected requests that run or wait here, by their owners. They leave it with a few steps of output."""

    def __init__(self) -> None:
        self.requests: dict[Hashable, tuple[Owner, PoisonRisk]] = {}
        """Suspected requests by attempt. Read-only."""
        self._num_steps: dict[Hashable, int] = {}
        self.has_news = False
        """A suspect was added and not reported. It must be reported before it runs: the replica may die of it."""

    def check(self, poison_risk: PoisonRisk, owner: Owner) -> None:
        """Raises `QueueFullError` while such a request must not run beside another router's suspects."""
        if not self.requests:
            return
        others = [theirs for other, theirs in self.requests.values() if other is not owner]
        is_in_the_way = poison_risk is PoisonRisk.ON_TRIAL and bool(others)
        if is_in_the_way or (poison_risk is PoisonRisk.SUSPECT and PoisonRisk.ON_TRIAL in others):
            raise QueueFullError("a suspect of another router runs here, and the two are tried apart", RETRY_S)

    def add(self, attempt: Hashable, poison_risk: PoisonRisk, owner: Owner) -> None:
        """Notes a suspected request that runs or waits here from now on; others are ignored."""
        if poison_risk is not PoisonRisk.NONE:
            self.requests[attempt] = (owner, poison_risk)
            self._num_steps[attempt] = 0
            self.has_news = True

    def note(self, deltas: Iterable[TokenDelta]) -> None:
        """Requests have got on, or have ended."""
        for delta in deltas:
            if delta.attempt in self.requests:
                self._num_steps[delta.attempt] += 1
                if delta.finish_reason is not None or self._num_steps[delta.attempt] == NUM_STEPS_TO_CLEAR:
                    self.drop(delta.attempt)

    def drop(self, attempt: Hashable) -> None:
        """Removes a request that has gone, or is no longer suspected. Unknown keys are ignored."""
        if self.requests.pop(attempt, None) is not None:
            del self._num_steps[attempt]

    def load_for(self, owner: Owner | None, load: EngineLoad) -> EngineLoad:
        """The replica's load as reported to this owner; None: an owner without requests here."""
        num_foreign = sum(other is not owner for other, _ in self.requests.values())
        return load if num_foreign == load.num_foreign_suspects else replace(load, num_foreign_suspects=num_foreign)
