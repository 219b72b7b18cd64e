"""Messages between simulated processes, besides those of the router's core (`router/events.py`) and of the link
(`worker/step_update.py`).

Replica to router: `Hello`, then `StepUpdate` and `Retiring`. Router to replica: `DialReplica`, then `SendSubmit` and
`SendAbort`. Client to router: `Generate`, or `Resets`. Router to client: `Admitted`, `OutputDelta` and `Fail`. Plain
data.
"""

from dataclasses import dataclass

from holdfast.cluster.simulate.actors.costly_message import CostlyMessage
from holdfast.router.resume_record import ResumeRecord
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
    resume: ResumeRecord | None
    timeout_s: float
    attempt: int = 1
    """Of the client, from 1."""
    costly: CostlyMessage | None = None
    """Its bytes, where they are more than those of ordinary requests, or end who reads them."""
    num_routers_lost: int = 0
    """In a row, while they were reading it, as its client says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resets:
    """Streams of one connection that are opened and reset at once, as they arrive together."""

    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A router has taken a call: its initial metadata."""
