"""Security of a cluster: settings, token, and the credentials of each port."""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.router.config import SecurityConfig
from holdfast.router.security.api_keys import KeyFile, read_keys
from holdfast.router.security.gate import Gate
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.link_security import LinkSecurity
from holdfast.worker.wire.loopback import is_loopback
from holdfast.worker.wire.tls import ServerTls, Tls

MIN_TOKEN_LENGTH: Final = 32
"""Characters of a token that someone has chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSecurity:
    """Secrets and settings that the processes of one cluster share. They travel over Ray alone, which has its own
    authentication.
    """

    token: str = field(repr=False)
    settings: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def gate(self) -> Gate:
        """Gate of a router, or of a replica's engine protocol."""
        path = self.settings.api_keys
        keys = None if path is None else KeyFile(path, time.monotonic)
        return Gate(keys, self.token, time.monotonic)

    @property
    def server_tls(self) -> ServerTls | None:
        """TLS of the ports that clients call."""
        tls = _server_files(self.settings)
        return None if tls is None else ServerTls(tls)

    @property
    def links(self) -> LinkSecurity:
        """Security of both ends of the links between routers and replicas."""
        return LinkSecurity(token=self.token, tls=_link_files(self.settings))


def check_files(settings: SecurityConfig) -> None:
    """Raises `ConfigurationError` for files that cannot be used. To be called where they are."""
    if settings.api_keys is not None:
        read_keys(settings.api_keys)
    if settings.cluster_token_file is not None:
        cluster_token(settings)
    for tls in (_server_files(settings), _link_files(settings)):
        if tls is not None:
            ServerTls(tls)


def check_exposed(settings: SecurityConfig, host: str) -> None:
    """Raises `ConfigurationError` for an address other than loopback without keys, unless it is wanted so."""
    if settings.api_keys is None and not settings.insecure and not is_loopback(host):
        raise ConfigurationError(
            f"cluster.host = {host!r}: everyone who reaches this address could use the models. Make keys with "
            "`holdfast keys add` and name their file by --api-keys (security.api_keys); or say --insecure "
            "(security.insecure) where the network itself admits no strangers; or listen on 127.0.0.1"
        )


def cluster_token(settings: SecurityConfig) -> str:
    """The token of the settings' file, or a new one. Raises `ConfigurationError`."""
    path = settings.cluster_token_file
    if path is None:
        return secrets.token_urlsafe(32)
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"security.cluster_token_file = {str(path)!r}: cannot be read ({error})") from None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        message = f"must hold one line of at least {MIN_TOKEN_LENGTH} printable ASCII characters without blanks"
        raise ConfigurationError(f"security.cluster_token_file = {str(path)!r}: {message}")
    return token


def _server_files(settings: SecurityConfig) -> Tls | None:
    if settings.tls_cert is None:
        return None
    return Tls(cert=settings.tls_cert, key=settings.tls_key, ca=settings.tls_client_ca)


def _link_files(settings: SecurityConfig) -> Tls | None:
    if settings.link_cert is None:
        return None
    return Tls(cert=settings.link_cert, key=settings.link_key, ca=settings.link_ca)
