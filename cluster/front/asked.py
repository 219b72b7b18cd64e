"""Request as it came to the front, where it may go, and what the front counts: plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from holdfast.cluster.front.upstream import Upstream
from holdfast.router.router_losses import ROUTERS_LOST
from holdfast.router.wire.resume_codec import HOLD, RESUME

ONCE: Final = ("/admin/",)
"""Paths that are sent once: what an order has done is not known when its router is lost."""

OF_A_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade expect content-length accept-encoding".split()
)
OURS: Final = tuple(name.encode() for name in (HOLD, RESUME, ROUTERS_LOST))
_FORWARDED: Final = b"x-forwarded-for"


@dataclass(slots=True)
class FrontStats:
    """What the front has done, since it started."""

    num_requests: int = 0
    num_open: int = 0
    num_held_bytes: int = 0
    """Bodies of open requests."""
    num_routers_lost: int = 0
    """Requests whose router was lost."""
    num_resumed: int = 0
    """Streams that went on at another router."""
    num_repeated: int = 0
    """Requests that were asked again before anything had come."""
    num_given_up: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """How long a front tries."""

    connect_s: float = 5.0
    reconnect_s: float = 60.0


@dataclass(slots=True)
class Routers:
    """Those that requests may go to: the one with the fewest that is not down, in turns."""

    all: Sequence[Upstream]
    turn: int = 0

    def choose(self, now: float) -> Upstream:
        self.turn += 1
        order = [self.all[(self.turn + number) % len(self.all)] for number in range(len(self.all))]
        return min(order, key=lambda one: (one.is_down_until_s > now, one.num_open))


@dataclass(slots=True)
class Asked:
    """A request as it came."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: str

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "Asked":
        target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        client = scope["client"][0] if scope.get("client") else "unknown"
        return cls(scope["method"].encode(), target, list(scope["headers"]), body, client)

    @property
    def holds_itself(self) -> bool:
        """Its client is a Holdfast transport: it is handed on as it is."""
        return any(name == HOLD.encode() for name, _ in self.headers)

    @property
    def is_sent_once(self) -> bool:
        return self.method != b"GET" and self.target.startswith(tuple(path.encode() for path in ONCE))

    def bytes_of(self, added: dict[str, str], body: bytes) -> list[bytes]:
        """The request as a router gets it. It learns for whom: whoever is forwarded is no caller of its own machine."""
        left_out = OF_A_HOP if self.holds_itself else OF_A_HOP.union(OURS)
        kept = [(name, value) for name, value in self.headers if name not in left_out and name != _FORWARDED]
        said = [value for name, value in self.headers if name == _FORWARDED]
        kept.append((_FORWARDED, b", ".join([*said, self.client.encode()])))
        kept.append((b"content-length", b"%d" % len(body)))
        kept += ((name.encode(), value.encode()) for name, value in added.items())
        lines = [b"%b %b HTTP/1.1\r\n" % (self.method, self.target)]
        lines += (b"%b: %b\r\n" % pair for pair in kept)
        return [b"".join(lines) + b"\r\n", body]
