"""Messages between simulated processes, besides those of the router's core (`router/events.py`) and of the link
(`worker/step_update.py`).

Replica to router: `Hello`, then `StepUpdate` and `Retiring`. Router to replica: `DialReplica`, then `SendSubmit` and
`SendAbort`. Client to router: `Generate`. Router to client: `Deliver` and `Fail`. Plain data.
"""

from dataclasses import dataclass

from holdfast.router.resume import Resume
from holdfast.worker.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DialReplica:
    """A router opens a link to a replica, which answers with `Hello`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retiring:
    """A replica stops admitting requests, or admits them again."""

    is_retiring: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A client's request; where its stream was cut off, with what it has received already."""

    request: EngineRequest
    resume: Resume | None
    timeout_s: float
    attempt: int = 1
    """Of the client, from 1."""
