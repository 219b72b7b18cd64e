"""Table of open answers by the tenant and the request ids that clients know, to end a request from outside.

What may not live here: how an answer ends (`answer.py`, `beam_answer.py`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast.worker.request import RequestKey


class Abortable(Protocol):
    """An answer that may still be under way."""

    def abort(self) -> bool:
        """Ends it after what it has. Returns whether there was anything to end."""


class OpenAnswers:
    """Of several with one key, the newest counts: the others have been superseded."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[RequestKey, Abortable]] = {}
        """By request id, then by the rest of the key."""
        self._num_of_tenant: Counter[str] = Counter()

    @contextmanager
    def holding(self, answer: Abortable, key: RequestKey) -> Iterator[None]:
        """The answer can be aborted while the context is open."""
        self._answers.setdefault(key.request_id, {})[key] = answer
        self._num_of_tenant[key.tenant] += 1
        try:
            yield
        finally:
            self._drop(answer, key)
            self._num_of_tenant[key.tenant] -= 1
            if not self._num_of_tenant[key.tenant]:
                del self._num_of_tenant[key.tenant]

    def num_of(self, tenant: str) -> int:
        """Open answers of a tenant."""
        return self._num_of_tenant.get(tenant, 0)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends all answers of this id, of one `tenant` or of all. Without any, `ID/N` names part N of the id.

        Returns whether one was under way.
        """
        named = self._named(request_id, tenant)
        if not named:
            whole, _, part = request_id.rpartition("/")
            named = [key for key in self._named(whole, tenant) if str(key.part) == part]
        were_open = [self._answers[key.request_id][key].abort() for key in named]
        return any(were_open)

    def _named(self, request_id: str, tenant: str | None) -> list[RequestKey]:
        return [key for key in self._answers.get(request_id, ()) if tenant in (None, key.tenant)]

    def _drop(self, answer: Abortable, key: RequestKey) -> None:
        answers = self._answers.get(key.request_id, {})
        if answers.get(key) is answer:
            del answers[key]
            if not answers:
                del self._answers[key.request_id]
