"""Connection of the HTTP server: uvicorn's, which also lets a response write its chunks straight to the socket.

Through ASGI a chunk is a message, checked and taken apart again by a coroutine: more work than the chunk itself. What
may not live here: what is written (`event_stream.py`), the server (`server.py`).
"""

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.router.security.connection_budgets import ClientConnection

CONNECTION: Final = "holdfast.connection"
"""Where a scope has its connection, on a server of ours."""


class Connection(HttpToolsProtocol):
    """One client's. Its scopes have it."""

    is_guest = False
    """It came while the router accepted no connections: it may ask for health, for operators and to be resumed."""
    num_chunks = 0
    """Those that `write_chunk` has written."""
    client_connection: ClientConnection | None = None
    """What the connection guard knows of it."""

    def end_with_answer(self) -> None:
        """Closes it once the request that it is at has been answered."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # it takes extensions
        scope[CONNECTION] = self

    def write_chunk(self, content: bytes) -> bool:
        """Writes a chunk of the response that is under way, which must be a chunked one, and must not be empty. False
        if it was not, because the client reads slower than it is written to, or has gone.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.num_chunks += 1
        self.transport.write(b"%x\r\n%b\r\n" % (len(content), content))
        return True
