"""Simulated attackers: calls that cost their router much, and floods of streams that are reset at once.

A call is sent again by the real retry policy: by `AsyncClient`, which reports the number of routers lost with it and
gives up, or by a gateway, which does not count lost routers.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.cluster.simulate.actors.client import SITE
from holdfast.cluster.simulate.actors.costly_message import CostlyMessage
from holdfast.cluster.simulate.actors.messages import Admitted, Generate, Resets
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.router.events import Fail
from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import (
    HoldfastError,
    OverloadedError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
)
from holdfast.worker.request import EngineRequest

CONNECT_S: Final = 5.0
RECONNECT_S: Final = 60.0
"""Default of `AsyncClient`."""
HOST: Final = "10.0.0.2"
"""All attackers call from one address."""
STREAMS_AT_ONCE: Final = 50
"""Streams of a flood that arrive together."""
RESETS_PER_S: Final = 20_000
"""Resets per second on one connection."""


class Attacker(Protocol):
    """Someone who wants a router to have more to do than it can."""

    is_over: bool

    def begin(self) -> None:
        """Sends the first message."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class CostlyCall:
    """One call, and what `AsyncClient` makes of its end."""

    request: EngineRequest
    message: CostlyMessage
    is_of_gateway: bool
    network: Network
    routers: list[SimulatedRouter]
    at: int
    """The router that it is sent to, by its number."""
    attempt: int = 0
    is_over: bool = False
    _connection: Connection | None = None
    _retry_policy: RetryPolicy | None = None

    def begin(self) -> None:
        """Sends the costly request to the first router."""
        self._retry_policy = RetryPolicy(
            num_routers=len(self.routers),
            connect_s=CONNECT_S,
            reconnect_s=RECONNECT_S,
            timeout_s=None,
            draw=self.network.rng.random,
            now=self.network.timeline.now,
        )
        self._send()

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        """Notes progress, and tries again where the request failed."""
        match message:
            case Admitted():
                self._policy.note_taken()
            case OutputDelta():
                self._policy.note_news()
                self.is_over = self.is_over or message.usage is not None
            case Fail():
                self._connection = None
                self._fail(message.error)

    def closed(self, connection: Connection) -> None:
        if connection is not self._connection or self.is_over:
            return
        try:
            if connection.has_broken:
                self._policy.note_router_lost()
        except RequestQuarantinedError:
            self.is_over = True
        else:
            self._retry(None)

    def __str__(self) -> str:
        return self.request.request_id

    # --- inside ---

    @property
    def _policy(self) -> RetryPolicy:
        assert self._retry_policy is not None, "it has begun"
        return self._retry_policy

    def _send(self) -> None:
        router = self.routers[self.at]
        self.attempt += 1
        path = self.network.path(SITE, router.site)
        self._connection = Connection(self.network, path, (self, router), HOST)
        call = Generate(
            request=self.request,
            resume=None,
            timeout_s=RECONNECT_S,
            attempt=self.attempt,
            costly=self.message,
            num_routers_lost=0 if self.is_of_gateway else self._policy.num_routers_lost,
        )
        if not self.is_of_gateway:
            self._policy.note_sent()
        self._connection.send(self, call)

    def _fail(self, error: HoldfastError) -> None:
        if isinstance(error, ReplicaError | RequestAbortedError | OverloadedError):
            self._retry(error.retry_after_s)
        else:
            self.is_over = True

    def _retry(self, hint_s: float | None) -> None:
        pause_s = self._policy.pause_s(self.network.timeline.now, hint_s)
        if pause_s is None:
            self.is_over = True
        else:
            self.at = (self.at + 1) % len(self.routers)
            self.network.timeline.after(pause_s, self._send)


@dataclass(slots=True, kw_only=True, eq=False)
class ResetFlood:
    """One connection on which streams are opened and reset at once, for as long as it is open."""

    num_streams: int
    network: Network
    router: SimulatedRouter
    is_over: bool = False
    _num_sent: int = 0

    def begin(self) -> None:
        """Opens a connection and resets streams on it."""
        path = self.network.path(SITE, self.router.site)
        self._send(Connection(self.network, path, (self, self.router), HOST))

    def receive(self, connection: Connection, message: Any) -> None:
        """Ignores the answer."""

    def closed(self, connection: Connection) -> None:
        self.is_over = True

    def __str__(self) -> str:
        return "flood"

    def _send(self, connection: Connection) -> None:
        if self._num_sent >= self.num_streams:
            connection.close(self)
            self.is_over = True
        elif not self.is_over:
            self._num_sent += STREAMS_AT_ONCE
            connection.send(self, Resets(num_streams=STREAMS_AT_ONCE))
            self.network.timeline.after(STREAMS_AT_ONCE / RESETS_PER_S, self._send, connection)
