"""Delayed calls: those that reach a router after their client has submitted the same request again.

Overloaded proxies and networks delay calls like this. The client has gone on elsewhere, or at the same router, so an
older submission arrives after a newer one: it must be turned away, and disturb nothing.
"""

from typing import Any

from holdfast.cluster.simulate.actors.messages import Generate
from holdfast.cluster.simulate.kernel.network import Connection, Network, Path
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.router.events import Fail, OutputDelta
from holdfast.worker.errors import RequestSupersededError


class Straggler:
    """One delayed call, on a connection of its own."""

    def __init__(self, call: Generate, network: Network, path: Path, router: Process) -> None:
        self.was_turned_away = False
        """It was told that a newer one goes on."""
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
        """The client waits for nothing any more."""
        self._is_given_up = True
        if self._has_arrived:
            self._connection.close(self)

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        match message:
            case Fail():
                self.was_turned_away = isinstance(message.error, RequestSupersededError)
            case OutputDelta():
                self.give_up()  # the newer one is not here, but at another router: nobody listens on this line

    def closed(self, connection: Connection) -> None:
        """Its last word has come before, or it is lost."""

    def __str__(self) -> str:
        return f"{self._call.request.request_id}, late"
