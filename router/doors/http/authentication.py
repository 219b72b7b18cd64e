"""HTTP authentication: which paths ask for a key, and where a request has it; without keys, where it comes from.

What may not live here: what a key may do (`router/security/`).
"""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.doors.connection_guard import ConnectionGuard
from holdfast.router.doors.http.connection import CONNECTION, Connection
from holdfast.router.doors.http.page_files import PAGE
from holdfast.router.doors.http.request_origin import OF_OPERATORS, RequestOrigins
from holdfast.router.doors.intake import charge
from holdfast.router.security.gate import Gate, bearer
from holdfast.worker.errors import AuthenticationError

OPEN: Final = ("/health", "/ping", "/ready", *PAGE)
"""For balancers and Kubernetes, which have no key: they tell whether this router serves, and nothing else. The page,
which is the same everywhere, knows nothing of itself, and sends the key that its reader fills in.
"""


def guarded(
    endpoint: Callable[[Request], Awaitable[ASGIApp]],
    path: str,
    gate: Gate,
    origins: RequestOrigins,
    guard: ConnectionGuard | None = None,
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of a path behind the gate, which is asked before any of the body is read; without keys, behind the
    rule of `origins`. The `guard` is told of each request whose connection it knows.
    """

    async def call(request: Request) -> ASGIApp:
        if gate.is_locked:
            check_key(request)
        else:
            origins.check(request)
        return await endpoint(request)

    def check_key(request: Request) -> None:
        try:
            caller = gate.enter(_presented(request))
        except AuthenticationError:
            tell_guard(guard, request, has_key=False)
            raise
        tell_guard(guard, request, has_key=True)
        charge(caller)
        if path in OF_OPERATORS:
            caller.check_operator()

    async def open_call(request: Request) -> ASGIApp:
        tell_guard(guard, request, has_key=False)
        return await endpoint(request)

    if path in OPEN:
        return open_call if gate.is_locked else endpoint
    return call


def tell_guard(guard: ConnectionGuard | None, request: Request, *, has_key: bool) -> None:
    """Counts the request on its connection, which ends with the answer if it has come to too many."""
    connection: Connection | None = request.scope.get(CONNECTION)
    if guard is None or connection is None or connection.client_connection is None:
        return
    if guard.http_call(connection.client_connection, has_key=has_key):
        connection.end_with_answer()


def _presented(request: Request) -> str:
    """OpenAI's clients send `authorization`, Anthropic's `x-api-key`."""
    return bearer(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "")
