"""Service options of a request, as keyword arguments shared by the engine, the clients and the command line.

None of them changes a token. What may not live here: sampling parameters (`worker/sampling_params.py`).
"""

from typing import TypedDict

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority


class ServiceOptions(TypedDict, total=False):
    """None of them changes a token of the completion."""

    priority: Priority
    """The class of service; `NORMAL` unless said otherwise."""
    tenant: str
    """On whose account; tenants share by `scheduler.tenant_shares`."""
    timeout_s: float | None
    """Seconds after which the request ends with a `DeadlineExceededError`."""
    cache_salt: str
    """Only requests with the same one find each other's prefixes in the cache."""


def check_timeout(timeout_s: float | None) -> None:
    """Raises `InvalidRequestError` for a timeout that is over before it begins. It must be known to be a number."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError("timeout_s", timeout_s, "must be above 0")
