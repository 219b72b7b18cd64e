"""Checks of a request's `Host` and `Origin`: hosts that a server answers for, and pages that may call it.

Without keys, a server accepts every caller, and a browser can call it on behalf of any open page: a page of another
site, or one whose name resolves to 127.0.0.1 (DNS rebinding). So without keys, a request must name a host of this
server and no foreign origin. A key is stronger than both checks: with keys, neither is made. With or without keys, a
body must have the content type of JSON, which a page cannot send to another origin unasked; an upload of a file is a
form, which a page can send, and rests on the two checks alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.http.page_files import PAGE
from holdfast.router.api.http.server import CONNECTION, Connection
from holdfast.router.api.intake import charge
from holdfast.router.security.gate import Gate, bearer
from holdfast.worker.errors import AuthenticationError, MediaTypeError, PermissionDeniedError

JSON: Final = "application/json"
SETTING: Final = "router.http_allowed_hosts"
CORS_SETTING: Final = "router.http_cors_origin"
ANY: Final = "*"

OPERATOR_PATHS: Final = ("/cluster", "/load", "/metrics")
"""Paths with data of all tenants. Paths below `/admin` are operators' too."""

_FROM_ELSEWHERE: Final = ("cross-site", "same-site")
"""Values of `sec-fetch-site` on requests made by a page of another origin."""


@dataclass(frozen=True, slots=True)
class RequestOrigins:
    """The rule of one server, which listens on `bound`. Names are without ports."""

    bound: str = "127.0.0.1"
    allowed_hosts: Collection[str] = ()
    """Further names of this server, and of sites whose pages may call it."""
    cors_origins: Collection[str] = ()
    """Origins of pages that may call it, but for paths of operators; `*` is any."""

    def check(self, request: Request) -> None:
        """Raises `PermissionDeniedError` for another server's name, and for pages of other origins."""
        host = request.headers.get("host", "")
        if not self._is_own(host_name(host)):
            message = f"this server does not answer for {host[:100]!r}; name it in {SETTING}, or require API keys"
            raise PermissionDeniedError("host", message)
        origin = request.headers.get("origin")
        if origin is None:
            is_foreign = request.headers.get("sec-fetch-site", "") in _FROM_ELSEWHERE
        else:
            is_foreign = not (self._may_call(origin, host) or self._is_given(origin, request))
        if is_foreign:
            site = (origin or "unnamed")[:100]
            message = f"this request comes from a page of another site ({site}); name the site in {SETTING} or "
            raise PermissionDeniedError("origin", f"{message}{CORS_SETTING}, or require API keys")

    def _is_given(self, origin: str, request: Request) -> bool:
        is_named = ANY in self.cors_origins or origin in self.cors_origins
        return is_named and not is_operators_path(request.url.path)

    def _is_own(self, name: str) -> bool:
        """Whether a host's name means this server. A server that listens for other machines does not know its names:
        unless they are configured, it answers for all.
        """
        if is_loopback(name) or name in self.allowed_hosts:
            return True
        if is_loopback(self.bound):
            return False
        return not self.allowed_hosts or name == self.bound

    def _may_call(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.netloc.lower() == host.lower() or host_name(parts.netloc) in self.allowed_hosts


def is_operators_path(path: str) -> bool:
    """Whether a path is for operators alone, and so for no page of another origin."""
    return path in OPERATOR_PATHS or path.startswith("/admin")


def check_json(request: Request) -> None:
    """Raises `MediaTypeError` unless the request's body is called JSON."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        message = f"the body is called {kind[:100]!r}" if kind else "the body has no content type"
        raise MediaTypeError(f"{message}; send the header `content-type: {JSON}` (`curl --json` does)")


def check_json_if_any(request: Request) -> None:
    """Likewise of a request that may come without a body."""
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        check_json(request)


def host_name(authority: str) -> str:
    """The host of `host:port`, in lower case and without the brackets of an IPv6 address; empty if it has none."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine wherever it is looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


OPEN: Final = ("/health", "/ping", "/ready", *PAGE)
"""Paths without a key, for load balancers and Kubernetes: they only tell whether this router serves. Also
the page, which is static and sends the key that its reader enters."""


def guarded(
    endpoint: Callable[[Request], Awaitable[ASGIApp]],
    path: str,
    gate: Gate,
    origins: RequestOrigins,
    guard: ConnectionGuard | None = None,
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint of a path behind the gate, which decides before any of the body is read; without keys, behind the
    rule of `origins`. The `guard` gets each request whose connection it knows.
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
        if path in OPERATOR_PATHS:
            caller.check_operator()

    async def open_request_stream(request: Request) -> ASGIApp:
        tell_guard(guard, request, has_key=False)
        return await endpoint(request)

    if path in OPEN:
        return open_request_stream if gate.is_locked else endpoint
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


_METHODS: Final = ("GET", "POST", "DELETE")
_EXPOSED: Final = ("x-request-id", "x-should-retry", "retry-after", "retry-after-ms", "x-holdfast-hold")
"""Headers of answers that clients read."""


def with_cors(app: ASGIApp, origins: Collection[str], guard: ConnectionGuard | None = None) -> ASGIApp:
    """The application for pages of these origins, too; `*` is any. Without origins it is the application itself. The
    `guard` gets preflights, which have no key.
    """
    return CrossOrigin(app, origins, guard) if origins else app


class CrossOrigin:
    """Answers preflights, and says on each answer which origin may read it. Operators' paths accept no foreign
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
