"""Calls that were held up on their way, and reach a router after the client has come again.

Proxies and networks that are overfull do that. The client has long gone on elsewhere, or at the same router, so that an
older submission arrives after a newer one: it must be turned away, and disturb nothing. What may not live here: what a
client makes of its answers (`client.py`).
"""

from typing import Any

from cluster.simulate.messages import Generate
from cluster.simulate.network import Connection, Network, Path
from cluster.simulate.process import Process
from router.events import Deliver, Fail
from worker.errors import RequestSupersededError


class Straggler:
    """One such call, on a connection of its own."""

    def __init__(self, call: Generate, network: Network, path: Path, router: Process) -> None:
        self.was_turned_away = False
        """It was told that a newer one goes on."""
        self.is_over = False
        self._call = call
        self._connection = Connection(network, path, (self, router))

    def arrive(self) -> None:
        """The call comes through, unless the client has had its answer."""
        if not self.is_over:
            self._connection.send(self, self._call)

    def give_up(self) -> None:
        """The client waits for nothing any more."""
        self.is_over = True
        self._connection.close(self)

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        match message:
            case Fail():
                self.is_over = True
                self.was_turned_away = isinstance(message.error, RequestSupersededError)
            case Deliver():
                # The newer one is not here: it has gone to another router. Nobody listens on this line.
                self.give_up()

    def closed(self, connection: Connection) -> None:
        self.is_over = True

    def __str__(self) -> str:
        return f"{self._call.request.request_id}, late"
