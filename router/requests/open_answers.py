"""Table of open answers by the request ids that clients know, for whoever ends a request from outside.

What may not live here: how an answer ends (`answer.py`, `beam_answer.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Abortable(Protocol):
    """An answer that may still be under way."""

    request_id: str

    def abort(self) -> bool:
        """Ends it after what it has. Returns whether there was anything to end."""


class OpenAnswers:
    """Of several with one id, the newest counts: the others have been superseded."""

    def __init__(self) -> None:
        self._answers: dict[str, Abortable] = {}

    @contextmanager
    def holding(self, answer: Abortable) -> Iterator[None]:
        """The answer can be aborted while the context is open."""
        self._answers[answer.request_id] = answer
        try:
            yield
        finally:
            if self._answers.get(answer.request_id) is answer:
                del self._answers[answer.request_id]

    def abort(self, request_id: str) -> bool:
        """Returns whether an answer of this id was under way."""
        answer = self._answers.get(request_id)
        return answer is not None and answer.abort()
