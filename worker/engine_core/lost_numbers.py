"""NaN and infinity in logits: the error that such a request gets, and when the replica may be at fault.

A request that makes the model overflow does so on every replica: it fails, and the others go on. Corrupt weights or
memory are the replica's fault and affect every request: the replica ends, and its requests continue on others. Which
of the two it is, a question with a known answer tells (`worker/supervision/known_answer_check.py`): several requests of
clients alone are no proof. What may not live here: finding such logits (`worker/sampling/finite_rows.py`).
"""

from collections.abc import Hashable, Sequence
from typing import Final, Protocol

from holdfast.worker.errors import InternalError, ReplicaError
from holdfast.worker.scheduling.scheduler import DroppedRequest
from holdfast.worker.step_update import StepListener

NUM_ALONE_TO_DOUBT: Final = 3
"""So many requests that failed in a row, each alone in its step, with no token drawn for anyone in between."""


class NumbersCheck(StepListener, Protocol):
    """Whom to ask whether the replica is well. A listener of the engine, whose own requests are its questions."""

    def ask_in_doubt(self) -> bool:
        """Asks at once. False: nobody can say. Else the engine is told to settle, or to fail."""


class LostNumbers:
    """Counts the requests of a replica whose logits were NaN or infinite, step by step."""

    def __init__(self) -> None:
        self._in_a_row: list[Hashable] = []

    def note_step(self, broken: Sequence[DroppedRequest], *, has_others: bool) -> ReplicaError | None:
        """The `broken` requests got no token in this step; `has_others`: other requests did. What is wrong where the
        replica may be at fault: several requests ran and none had finite logits.
        """
        if has_others:
            self._in_a_row.clear()
            return None
        names: dict[Hashable, None] = {}
        for one in broken:
            names[one.request.group_id or one.request.key] = None
        for name in names:
            if name not in self._in_a_row:
                self._in_a_row.append(name)
        if len(names) <= 1 and len(self._in_a_row) < NUM_ALONE_TO_DOUBT:
            return None
        count = max(len(names), len(self._in_a_row))
        return ReplicaError(f"the model's logits are no numbers (NaN or infinite) for any of {count} requests")

    def settle(self) -> None:
        """The replica is well: what came before proves nothing any more."""
        self._in_a_row.clear()


def no_numbers() -> InternalError:
    """The error that such a request gets."""
    return InternalError("the model's logits for this request are no numbers (NaN or infinite), so no token can follow")
