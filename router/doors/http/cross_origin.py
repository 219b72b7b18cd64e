"""Cross-origin access (CORS): which pages of other sites browsers let call the server and read its answers.

By starlette's middleware, around the whole application, so that preflights, errors and streams are answered alike. What
may not live here: which requests are let in (`request_origin.py`, `authentication.py`).
"""

from collections.abc import Collection
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.router.doors.connection_guard import ConnectionGuard
from holdfast.router.doors.http.authentication import tell_guard
from holdfast.router.doors.http.request_origin import is_operators_path

_METHODS: Final = ("GET", "POST")
_EXPOSED: Final = ("x-request-id", "x-should-retry", "retry-after", "retry-after-ms", "x-holdfast-hold")
"""Headers of answers that clients read."""


def with_cors(app: ASGIApp, origins: Collection[str], guard: ConnectionGuard | None = None) -> ASGIApp:
    """The application for pages of these origins, too; `*` is any. Without origins it is the application itself. The
    `guard` is told of preflights, which have no key.
    """
    return CrossOrigin(app, origins, guard) if origins else app


class CrossOrigin:
    """Answers preflights, and says on each answer which origin may read it. Paths of operators are for no other
    origin.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], guard: ConnectionGuard | None) -> None:
        self._app = app
        self._guard = guard
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] != "http" or is_operators_path(scope["path"])
        if not is_own and scope["method"] == "OPTIONS":
            tell_guard(self._guard, Request(scope), has_key=False)
        await (self._app if is_own else self._cors)(scope, receive, send)
