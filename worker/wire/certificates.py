"""Certificates of one router, and when they expire: for its metrics and its health."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.worker.wire.tls import ServerTls, Tls, expiry_warning, first_expiry


class Certificates:
    """As they are now: their files may be replaced."""

    def __init__(self, clients: ServerTls | None, links: Tls | None) -> None:
        """What the ports of clients show, and what this end of the links shows; None: nothing."""
        self._clients = clients
        self._links = links

    def expiries(self) -> Mapping[str, float]:
        """By use, in seconds since 1970."""
        return {use: expires_s for use, (_, expires_s) in self._found().items()}

    def warnings(self, now_s: float) -> tuple[str, ...]:
        """For people: which have expired, or are about to."""
        said = (expiry_warning(path, expires_s, now_s) for path, expires_s in self._found().values())
        return tuple(filter(None, said))

    def _found(self) -> dict[str, tuple[str, float]]:
        found = {}
        if self._clients is not None:
            found["clients"] = self._clients.cert, self._clients.expires_s
        if self._links is not None and self._links.cert is not None:
            with suppress(OSError, ValueError):  # while it is being replaced
                found["links"] = str(self._links.cert), first_expiry(Path(self._links.cert).read_bytes())
        return found
