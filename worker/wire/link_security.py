"""Security of the links between routers and replicas: the cluster's token, and TLS in both directions.

Both ends have the same settings: a peer without the token is no router of this cluster.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import grpc

from holdfast.worker.wire.tls import ServerTls, Tls, add_port

TOKEN_METADATA: Final = "x-holdfast-cluster-token"

LINK_NAME: Final = "holdfast-link"
"""Name in the certificates of links. Replicas come and go at addresses that no certificate could name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSecurity:
    """Security of one end of a link."""

    token: str = field(default="", repr=False)
    """Empty: no token is sent or required."""
    tls: Tls | None = None
    """Certificate, key and CA: each end asks the other for its certificate. None: without TLS."""

    # --- of a router ---

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that a router sends with its call."""
        return ((TOKEN_METADATA, self.token),) if self.token else ()

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """Channel to a replica. Its certificate must be for `LINK_NAME`. Raises `ConfigurationError` for files that are
        not there.
        """
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", LINK_NAME)]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=named)

    # --- of a replica ---

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata has the token. It is compared by its hash, in constant time."""
        if not self.token:
            return True
        sent = next((value for name, value in metadata if name == TOKEN_METADATA), "")
        return hmac.compare_digest(_digest(sent), _digest(self.token))

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Makes a replica's server listen there. Returns the port."""
        return add_port(server, address, None if self.tls is None else ServerTls(self.tls))


UNSECURED: Final = LinkSecurity()
"""Security of links inside one process or test."""


def _digest(token: str | bytes) -> bytes:
    return hashlib.sha256(token if isinstance(token, bytes) else token.encode()).digest()
