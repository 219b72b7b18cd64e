"""Where a request says it comes from and goes to: hosts that a server answers for, and pages that may call it.

Without keys, a server takes whoever reaches it, and a browser reaches it for any page that is open there: one of
another site, or one whose name has come to mean 127.0.0.1 (DNS rebinding). So without keys a request must name a host
that is this server's, and no page of another origin. A key says more than both: where keys are asked for, neither is
looked at. And with or without keys, a body must be called JSON, which no page may send unasked to another origin.
What may not live here: keys (`authentication.py`), which callers may give orders (`admin.py`).
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from holdfast.worker.errors import MediaTypeError, PermissionDeniedError

JSON: Final = "application/json"
SETTING: Final = "router.http_allowed_hosts"
CORS_SETTING: Final = "router.http_cors_origin"
ANY: Final = "*"

OF_OPERATORS: Final = ("/cluster", "/load", "/metrics")
"""They tell of all tenants. Paths below `/admin` are operators' too."""

_FROM_ELSEWHERE: Final = ("cross-site", "same-site")
"""What browsers say in `sec-fetch-site` of a request that a page of another origin has made."""


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
            told = f"this server does not answer for {host[:100]!r}; name it in {SETTING}, or ask for keys"
            raise PermissionDeniedError("host", told)
        origin = request.headers.get("origin")
        if origin is None:
            is_foreign = request.headers.get("sec-fetch-site", "") in _FROM_ELSEWHERE
        else:
            is_foreign = not (self._may_call(origin, host) or self._is_given(origin, request))
        if is_foreign:
            told = f"this request comes from a page of another site ({(origin or 'unnamed')[:100]}); name the site in "
            raise PermissionDeniedError("origin", f"{told}{SETTING} or {CORS_SETTING}, or ask for keys")

    def _is_given(self, origin: str, request: Request) -> bool:
        is_named = ANY in self.cors_origins or origin in self.cors_origins
        return is_named and not is_operators_path(request.url.path)

    def _is_own(self, name: str) -> bool:
        """Whether a host's name means this server. One that listens for other machines is called by names that it does
        not know: unless they are given, it answers for all.
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
    return path in OF_OPERATORS or path.startswith("/admin")


def check_json(request: Request) -> None:
    """Raises `MediaTypeError` unless the request's body is called JSON."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        told = f"the body is called {kind[:100]!r}" if kind else "the body has no content type"
        raise MediaTypeError(f"{told}; send the header `content-type: {JSON}` (`curl --json` does)")


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
