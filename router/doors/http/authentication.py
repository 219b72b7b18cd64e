"""HTTP authentication: which paths ask for a key, and where a request has it.

What may not live here: what a key may do (`router/security/`).
"""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.doors.http.page_files import PAGE
from holdfast.router.security.gate import Gate, bearer

OPEN: Final = ("/health", "/ping", "/ready", *PAGE)
"""For balancers and Kubernetes, which have no key: they tell whether this router serves, and nothing else. The page,
which is the same everywhere, knows nothing of itself, and sends the key that its reader fills in.
"""

OF_OPERATORS: Final = ("/cluster", "/load", "/metrics")
"""They tell of all tenants. Paths of `admin.py` are operators' too, and ask themselves."""


def guarded(
    endpoint: Callable[[Request], Awaitable[ASGIApp]], path: str, gate: Gate
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of a path behind the gate, which is asked before any of the body is read."""
    if not gate.is_locked or path in OPEN:
        return endpoint

    async def call(request: Request) -> ASGIApp:
        caller = gate.enter(_presented(request))
        if path in OF_OPERATORS:
            caller.check_operator()
        return await endpoint(request)

    return call


def _presented(request: Request) -> str:
    """OpenAI's clients send `authorization`, Anthropic's `x-api-key`."""
    return bearer(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "")
