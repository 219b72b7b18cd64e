"""Messages between simulated processes, in addition to those of the router's core (`router/events.py`) and of the link
(`worker/step_update.py`).

Replica to router: `Hello`, then `StepUpdate` and `Retiring`. Router to replica: `DialReplica`, then `SendSubmit` and
`SendAbort`. Client to router: `Generate`, or `Resets`. Router to client: `Admitted`, `OutputDelta` and `Fail`. A
`Straggler` is a `Generate` that reaches its router after its client has submitted the request again.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.cluster.simulate.actors.costly_message import CostlyMessage
from holdfast.cluster.simulate.kernel.network import Connection, Network, Path
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.router.events import Fail
from holdfast.router.generation import OutputDelta
from holdfast.router.resume import ResumeRecord
from holdfast.worker.errors import RequestSupersededError
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
    """A client's request; after a cut, with the client's resume record."""

    request: EngineRequest
    resume: ResumeRecord | None
    timeout_s: float
    attempt: int = 1
    """Attempt number of the client, from 1."""
    costly: CostlyMessage | None = None
    """Bytes of the message, if more than those of ordinary requests, or if they end their reader."""
    num_routers_lost: int = 0
    """Routers lost in a row while they were reading it, as its client reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resets:
    """Streams of one connection that are opened and reset at once, as they arrive together."""

    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A router has taken a call: its initial metadata."""


class Straggler:
    """One delayed call, on a separate connection."""

    def __init__(self, call: Generate, network: Network, path: Path, router: Process) -> None:
        self.was_turned_away = False
        """A newer submission has replaced it."""
        self._call = call
        self._connection = Connection(network, path, (self, router))
        self._has_arrived = False
        self._is_given_up = False

    def arrive(self) -> None:
        """The call arrives, followed by its end if the client has given it up."""
        self._has_arrived = True
        self._connection.send(self, self._call)
        if self._is_given_up:
            self._connection.close(self)

    def give_up(self) -> None:
        """The client has ended the call."""
        self._is_given_up = True
        if self._has_arrived:
            self._connection.close(self)

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        """Notes whether the older call of a resumed request was refused."""
        match message:
            case Fail():
                self.was_turned_away = isinstance(message.error, RequestSupersededError)
            case OutputDelta():
                self.give_up()  # the newer call is at another router: nobody listens on this connection

    def closed(self, connection: Connection) -> None:
        """The last message has come before, or it is lost."""

    def __str__(self) -> str:
        return f"{self._call.request.request_id}, late"
