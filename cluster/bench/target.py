"""Target of a bench: which server, by which protocol, from what the user wrote.

What may not live here: speaking the protocol (`*_sender.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.security.tls import Tls

if TYPE_CHECKING:
    from holdfast.cluster.bench.sender import Sender

PROTOCOLS: Final = ("chat", "completions", "holdfast", "holdfast-chat", "oip")
_FORMS: Final = "must be http(s)://HOST:PORT, HOST:PORT of holdfast's gRPC, or oip://HOST:PORT"
_OVER_HTTP: Final = ("chat", "completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    server: str
    """Without a scheme, but for HTTP."""
    protocol: str

    @classmethod
    def parsed(cls, server: str, protocol: str | None) -> "Target":
        """Raises `ConfigurationError`."""
        if protocol is not None and protocol not in PROTOCOLS:
            raise ConfigurationError(f"--protocol {protocol}: must be among {', '.join(PROTOCOLS)}")
        scheme, found, rest = server.partition("://")
        if not found:
            scheme, rest = "oip" if protocol == "oip" else "grpc", server
        if scheme not in ("http", "https", "grpc", "oip") or not _has_ports(rest, needs_port=scheme[:4] != "http"):
            raise ConfigurationError(f"--server {server}: {_FORMS}")
        is_http = scheme in ("http", "https")
        chosen = protocol or {"grpc": "holdfast", "oip": "oip"}.get(scheme, "completions")
        if is_http != (chosen in _OVER_HTTP) or (scheme == "oip") != (chosen == "oip"):
            raise ConfigurationError(
                f"--protocol {chosen} (with --server {server}): the two do not fit; --server {_FORMS}"
            )
        if is_http and not urlsplit(server).path.strip("/"):
            server = f"{server.rstrip('/')}/v1"
        return cls(server=server.rstrip("/") if is_http else rest, protocol=chosen)

    @property
    def has_conversations(self) -> bool:
        return self.protocol in ("chat", "holdfast-chat")

    async def sender(
        self, model: str, params: Mapping[str, Any], *, api_key: str = "", tls: Tls | None = None
    ) -> "tuple[Sender, str]":
        """On the running event loop; and the model's name as the server will be told. Raises `ConfigurationError`."""
        if self.protocol in _OVER_HTTP:
            from holdfast.cluster.bench.http_sender import HttpSender

            is_chat = self.protocol == "chat"
            http = HttpSender(self.server, model, is_chat=is_chat, params=params, api_key=api_key, tls=tls)
            try:
                return http, await http.choose_model()
            except ConfigurationError:
                await http.close()
                raise
        if self.protocol == "oip":
            from holdfast.cluster.bench.oip_sender import OipSender

            return OipSender(self.server, model, params=params, api_key=api_key, tls=tls), model
        from holdfast.cluster.bench.holdfast_sender import HoldfastSender
        from holdfast.worker.sampling_params import SamplingParams

        return HoldfastSender(
            self.server.split(","),
            model,
            is_chat=self.has_conversations,
            params=SamplingParams(**params),
            api_key=api_key,
            tls=tls,
        ), model


def _has_ports(text: str, *, needs_port: bool) -> bool:
    try:
        hosts = [urlsplit(f"//{one}") for one in text.split(",")]
        return all(host.hostname and (host.port or not needs_port) for host in hosts)
    except ValueError:
        return False
