"""Preflight checks of a cluster on this machine: mistakes that can be seen before Ray starts. It is imported by a
process that stays small.
"""

import os
import socket
from pathlib import Path
from typing import Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.machine import Machine, check_fits
from holdfast.cluster.config.model_files import check_files as check_model_files
from holdfast.cluster.serve.kept_process import command_of
from holdfast.cluster.serve.log_files import RAY_VARIABLES, ray_folder
from holdfast.cluster.serve.security import check_exposed, check_files
from holdfast.worker.errors import ConfigurationError, StoreError
from holdfast.worker.wire.loopback import LOOPBACK, check_loopback

_LONGEST_PATH: Final = 107
"""Longest path of a Unix socket: unix(7)."""

_SOCKET: Final = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest that Ray makes (2.60)."""


def check_here(config: HoldfastConfig) -> None:
    """Finds the mistakes that a replica would otherwise report only after half a minute of start-up."""
    cluster = config.cluster
    if cluster.address is not None:
        return
    check_loopback()
    check_socket_paths()
    check_exposed(config.security, cluster.host or LOOPBACK)
    check_files(config.security)
    for one in config.each_model:
        check_model_files(one)
    check_fits(config.each_model, Machine.here())
    check_store(config.router.store)
    check_ports(config)


def check_store(place: str | None) -> None:
    """Opens the store of responses, and makes it where it is a folder. Raises `ConfigurationError`."""
    if place is None:
        return
    from holdfast.router.store.database import Database

    try:
        Database(place).engine.dispose()
    except StoreError as error:
        raise ConfigurationError(str(error)) from error


def check_ports(config: HoldfastConfig) -> None:
    """Raises `ConfigurationError` for a port that is taken."""
    cluster = config.cluster
    firsts = {name: getattr(cluster, name) for name in ("port", "http_port", "admin_port")}
    wanted = [pair for ports in cluster.router_ports for pair in zip(firsts.items(), ports, strict=True)]
    if cluster.http_front_port is not None:
        command_of(config)
    if cluster.http_front_port:
        wanted.append((("http_front_port", cluster.http_front_port), cluster.http_front_port))
    for (setting, first), port in wanted:
        try:
            family = socket.AF_INET6 if ":" in (cluster.host or LOOPBACK) else socket.AF_INET
            socket.create_server((cluster.host or LOOPBACK, port or 0), family=family).close()
        except OSError as error:
            flag = f"--{setting.replace('_', '-')}"
            way_out = f"is another `holdfast serve` running? Choose another by {flag} (0: a free one)"
            reason = f"cluster.{setting} = {first}: port {port} is not free ({error}); {way_out}"
            raise ConfigurationError(reason) from error


def check_socket_paths(folder: Path | None = None) -> None:
    """Raises `ConfigurationError` where the paths of Ray's sockets, below `folder`, would be too long for Linux."""
    folder = ray_folder() if folder is None else folder
    most = _LONGEST_PATH - len(_SOCKET)
    if len(str(folder)) > most:
        variable = next((name for name in RAY_VARIABLES if os.environ.get(name)), "TMPDIR")
        raise ConfigurationError(
            f"{variable}: Ray makes its sockets in {folder}, {len(str(folder))} characters long, and their paths may "
            f"have {_LONGEST_PATH}: set RAY_TMPDIR to a folder whose path has {most - len('/ray')} at most, as /tmp"
        )
