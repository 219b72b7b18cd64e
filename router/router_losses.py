"""Router losses: the requests that a router was reading when it ended, as routers and clients report them to each
other.

Plain data.
"""

from dataclasses import dataclass
from typing import Final

from holdfast.worker.errors import InvalidRequestError

ROUTERS_LOST: Final = "x-holdfast-routers-lost"
"""Header and metadata of a request: the number of consecutive routers that ended while they were reading it."""

_MAX_DIGITS: Final = 3

MAX_ROUTERS_LOST: Final = 2
"""Number of routers lost while reading a request after which it counts as the cause and is refused."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RouterLoss:
    """One request that one router was reading when it ended."""

    digest: str
    """Digest of the request, by `request_digest`."""
    router: str
    """The process that ended, by a name that no other process has."""
    at_s: float
    """When it was noticed, in seconds since 1970."""
    is_proof: bool = False
    """No other request can be the cause."""
    is_first: bool = False
    """This router has read the same request before without a loss: losses that were reported earlier do not count."""


def routers_lost(text: str) -> int:
    """Number of lost routers in a request's `ROUTERS_LOST`. Raises `InvalidRequestError`."""
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise InvalidRequestError(ROUTERS_LOST, text[:100], f"must be a number of at most {_MAX_DIGITS} digits")
    return int(text)
