"""Table of open answers by the request ids that clients know, for whoever ends a request from outside.

What may not live here: how an answer ends (`answer.py`, `beam_answer.py`).
"""

from collections import Counter
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
        self._answers: dict[str, tuple[Abortable, str]] = {}
        """With the tenant of each."""
        self._num_of_tenant: Counter[str] = Counter()

    @contextmanager
    def holding(self, answer: Abortable, tenant: str = "") -> Iterator[None]:
        """The answer can be aborted while the context is open."""
        own = self._answers[answer.request_id] = answer, tenant
        self._num_of_tenant[tenant] += 1
        try:
            yield
        finally:
            if self._answers.get(answer.request_id) is own:
                del self._answers[answer.request_id]
            self._num_of_tenant[tenant] -= 1
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant]

    def num_of(self, tenant: str) -> int:
        """Open answers of a tenant."""
        return self._num_of_tenant.get(tenant, 0)

    def belongs_to_another(self, request_id: str, tenant: str) -> bool:
        """Whether an answer of this id is open that is another tenant's."""
        return self._answers.get(request_id, (None, tenant))[1] != tenant

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Returns whether an answer of this id was under way. With a `tenant`, others' are as if they were not."""
        answer, owner = self._answers.get(request_id, (None, ""))
        return answer is not None and tenant in (None, owner) and answer.abort()
