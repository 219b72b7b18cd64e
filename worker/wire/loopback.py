"""Addresses of this machine, and channels that go straight to them, past any proxy of the environment."""

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.worker.errors import ConfigurationError

LOOPBACK: Final = "127.0.0.1"
ANY_INTERFACE: Final = "0.0.0.0"

NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""Option of a channel: it does not go by `http_proxy` and its like, which are for what lies outside of a cluster."""

ChannelOptions = Sequence[tuple[str, int]]

_SCHEME: Final = re.compile(r"^(dns:(//[^/]*/)?|ipv[46]:)")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reaching(address: str, options: ChannelOptions) -> list[tuple[str, int]]:
    """The options of a channel to `address` (`host:port`, or a name by which gRPC knows it): straight to loopback."""
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]")
    return [*options, NO_PROXY] if is_loopback(host) else list(options)


def proxy_on_the_way(address: str, environ: Mapping[str, str]) -> str:
    """Name of the variable by which gRPC goes to `address` by a proxy; empty where it goes straight there."""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]")
    if NO_PROXY in reaching(address, ()):
        return ""
    excepted = (environ.get("no_grpc_proxy") or environ.get("no_proxy") or "").split(",")
    if any(host.endswith(suffix.strip()) for suffix in excepted if suffix.strip()):
        return ""
    return next((name for name in names if environ.get(name, "").lower().startswith("http://")), "")


def check_loopback(host: str = LOOPBACK) -> None:
    """Raises `ConfigurationError` on a machine whose loopback has no IPv4: ranks and Ray meet there, whatever address
    clients are served at.
    """
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        raise ConfigurationError(
            f"this machine cannot listen on {host} ({error.strerror}), where processes of a replica and of Ray meet; "
            f"give its loopback that address (`ip addr add {host}/8 dev lo`); a replica of one rank in one process "
            "(`LLM`, `holdfast generate`) does without"
        ) from error
