"""TLS from PEM files: credentials for both ends of gRPC, and contexts of the standard library. Files may be replaced.

A server reads its files again when they have changed, at the next handshake; connections that there are go on. Files
that do not match are ignored, and the earlier ones stay in use. `Certificates` says when they expire.
"""

import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import grpc

from holdfast.worker.errors import ConfigurationError

DAY_S: Final = 86_400.0
NOTICE_S: Final = 14 * DAY_S
"""Seconds before the expiry of a certificate from which warnings are logged."""

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_VERSION: Final = 0xA0  # DER tag, RFC 5280
_UTC_TIME: Final = 0x17  # DER tag, X.690


def first_expiry(pem: bytes) -> float:
    """When the first certificate of a PEM file expires, in seconds since 1970. Raises `ValueError` for one without."""
    found = [_not_after(ssl.PEM_cert_to_DER_cert(one)) for one in _certificates(pem.decode(errors="replace"))]
    if not found:
        raise ValueError("it has no certificate")
    return min(found)


def expiry_warning(path: str | Path, expires_s: float, now_s: float) -> str:
    """Warning for people; empty while there is time. Both times are since 1970."""
    date = datetime.fromtimestamp(expires_s, UTC).isoformat(timespec="seconds")
    way_out = "replace its files, and new connections use them without a restart"
    if now_s >= expires_s:
        return f"the certificate {path} has expired ({date}): clients refuse new connections; {way_out}"
    if expires_s - now_s < NOTICE_S:
        return f"the certificate {path} expires in {(expires_s - now_s) / DAY_S:.1f} days ({date}); {way_out}"
    return ""


def _certificates(text: str) -> Iterator[str]:
    for piece in text.split(_BEGIN)[1:]:
        yield _BEGIN + piece.partition(_END)[0] + _END


def _not_after(der: bytes) -> float:
    """End of validity of an X.509 certificate (RFC 5280): the second time of its `validity`."""
    try:
        _, certificate, _ = _element(der)
        _, signed, _ = _element(certificate)
        tag, _, rest = _element(signed)
        skipped = 3 if tag == _VERSION else 2  # serial number, signature, issuer
        for _ in range(skipped):
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        tag, text, _ = _element(rest)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        when = datetime.strptime(text.decode("ascii"), form)
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("it is no X.509 certificate") from error
    return when.replace(tzinfo=UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The first element of DER: its tag, its content, and the rest."""
    tag, length, at = data[0], data[1], 2
    if length >= 0x80:
        at = 2 + (length & 0x7F)
        length = int.from_bytes(data[2:at], "big")
    if len(data) < at + length:
        raise ValueError("it is cut off")
    return tag, data[at : at + length], data[at + length :]


logger = logging.getLogger(__name__)

OLDEST: Final = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of one end: its certificate and key, and the CA that it trusts."""

    cert: str | Path | None = None
    """The chain of certificates by which this end says who it is, its own first."""
    key: str | Path | None = None
    """The private key of `cert`."""
    ca: str | Path | None = None
    """Certificates that sign those of the other end. Of a client, None: those of the system. Of a server: it asks
    clients for certificates; None: it does not."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"tls: cert = {self.cert!r}, key = {self.key!r}: must be set together")

    @property
    def stamp(self) -> tuple[object, ...]:
        """Changes when one of the files is written or replaced."""
        return _stamp(self)

    # --- of a client ---

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel, with the files as they are now. Raises `ConfigurationError`."""
        return grpc.ssl_channel_credentials(_bytes(self.ca), _bytes(self.key), _bytes(self.cert))

    def client_context(self) -> ssl.SSLContext:
        """Context of the standard library, with the files as they are now. Raises `ConfigurationError`."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"tls: {self.ca or self.cert}: {_reason(error)}") from None
        return context


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files of a server at one moment."""

    stamp: tuple[object, ...]
    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext
    expires_s: float
    """Expiry of the chain, in seconds since 1970."""


class ServerTls:
    """The files of one server, which may be replaced while it serves. Used from any thread."""

    def __init__(self, tls: Tls) -> None:
        """Raises `ConfigurationError` for files that cannot be used."""
        self._tls = tls
        self._lock = threading.Lock()
        self._refused: tuple[object, ...] | None = None
        """The stamp of files that could not be used; each is logged once."""
        self._warned = ""
        """Warning about the certificate's expiry that was logged last."""
        try:
            self._loaded = _load(tls)
        except (OSError, ValueError) as error:
            message = f"tls: cert = {str(tls.cert)!r}, key = {str(tls.key)!r}, ca = {str(tls.ca)!r}: {_reason(error)}"
            raise ConfigurationError(message) from None
        self._warn()

    @property
    def cert(self) -> str:
        """The path of its certificate."""
        return str(self._tls.cert)

    @property
    def expires_s(self) -> float:
        """When the certificate of new connections expires, in seconds since 1970."""
        return self._current().expires_s

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for ports of gRPC servers."""
        given = self._loaded

        def fetch() -> Any:  # None, which the stubs do not know, leaves the configuration as it was
            nonlocal given
            now = self._handshake()
            if now is given:
                return None
            given = now
            return now.configuration

        return grpc.dynamic_ssl_server_credentials(
            given.configuration, fetch, require_client_authentication=self._tls.ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """Context for servers of asyncio. Each handshake is made with the files as they are then."""
        context = _context(self._tls)
        context.sni_callback = self._choose  # it is called for every handshake, also without a name
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._handshake().context

    def _handshake(self) -> _Loaded:
        """Credentials for a new connection."""
        loaded = self._current()
        self._warn()
        return loaded

    def _warn(self) -> None:
        """Once for each certificate that is about to expire, and once that it has."""
        loaded, now_s = self._loaded, time.time()
        if said := expiry_warning(str(self._tls.cert), loaded.expires_s, now_s):
            has_expired = now_s >= loaded.expires_s
            once = f"{loaded.stamp} {has_expired}"
            if once != self._warned:
                self._warned = once
                logger.log(logging.ERROR if has_expired else logging.WARNING, "%s", said)

    def _current(self) -> _Loaded:
        with self._lock:
            stamp = _stamp(self._tls)
            if stamp not in (self._loaded.stamp, self._refused):
                try:
                    self._loaded = _load(self._tls)
                    logger.info("the certificate %s has changed", self._tls.cert)
                except (OSError, ValueError) as error:
                    self._refused = stamp
                    logger.error("the certificate %s stays as it was: %s", self._tls.cert, _reason(error))
            return self._loaded


def add_port(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    """Makes a server listen there, over TLS or without. Returns the port. Raises `RuntimeError` if it is taken."""
    return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.grpc_credentials())


def _load(tls: Tls) -> _Loaded:
    """Raises `OSError` or `ValueError` for files that cannot be used, or that were replaced meanwhile."""
    stamp, context = _stamp(tls), _context(tls)  # which checks that the key is that of the certificate
    cert, key, ca = (None if path is None else Path(path).read_bytes() for path in (tls.cert, tls.key, tls.ca))
    if _stamp(tls) != stamp:
        raise ValueError("the files were being replaced")
    assert cert is not None, "the context could not be made without it"
    assert key is not None, "nor without this"
    configuration = grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
    return _Loaded(stamp, configuration, context, first_expiry(cert))


def _context(tls: Tls) -> ssl.SSLContext:
    if tls.cert is None:
        raise ValueError("a server needs a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """OpenSSL would ask for it at the terminal."""
    raise ValueError("the private key is encrypted; a server needs an unencrypted one")


def _stamp(tls: Tls) -> tuple[object, ...]:
    """Changes when a file is written or replaced."""
    found = []
    for path in (tls.cert, tls.key, tls.ca):
        try:
            status = None if path is None else os.stat(path)
        except OSError:
            status = None
        found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _bytes(path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"tls: {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The reason without OpenSSL's source lines."""
    if isinstance(error, ssl.SSLError):
        return f"it is not PEM, or certificate and key do not match ({error.reason or 'unknown'})"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class Certificates:
    """Certificates as they are now: their files may be replaced."""

    def __init__(self, clients: ServerTls | None, links: Tls | None) -> None:
        """Certificates of the clients' ports, and of this end of the links; None: none."""
        self._clients = clients
        self._links = links

    def expiries(self) -> Mapping[str, float]:
        """Expiries by use, in seconds since 1970."""
        return {use: expires_s for use, (_, expires_s) in self._found().items()}

    def warnings(self, now_s: float) -> tuple[str, ...]:
        """Warnings for people: certificates that have expired, or are about to."""
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
