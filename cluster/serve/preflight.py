"""Preflight checks of a cluster on this machine: mistakes that can be seen before Ray starts.

What may not live here: what needs Ray to be seen (`serving.py`). It is imported by a process that stays small.
"""

import socket
from pathlib import Path

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.local import LOOPBACK
from holdfast.cluster.serve.security import check_exposed, check_files
from holdfast.worker.errors import ConfigurationError


def check_here(config: HoldfastConfig) -> None:
    """Finds the mistakes that a replica would otherwise report only after half a minute of start-up."""
    cluster = config.cluster
    if cluster.address is not None:
        return
    check_exposed(config.security, cluster.host or LOOPBACK)
    check_files(config.security)
    for one in config.each_model:
        check_folders(one)
    for ports in cluster.router_ports:
        firsts = {name: getattr(cluster, name) for name in ("port", "http_port", "admin_port")}
        for (setting, first), port in zip(firsts.items(), ports, strict=True):
            try:
                socket.create_server((cluster.host or LOOPBACK, port or 0)).close()
            except OSError as error:
                way_out = f"choose another by --{setting.replace('_', '-')}"
                reason = f"cluster.{setting} = {first}: port {port} is not free ({error}); {way_out}"
                raise ConfigurationError(reason) from error


def check_folders(config: HoldfastConfig) -> None:
    """Refuses folders of a model that are not here."""
    draft = config.speculation.draft_model if config.speculation.speculative == "draft" else None
    for setting, folder in (("model.model", config.model.model), ("speculation.draft_model", draft or "")):
        if folder.startswith(("/", ".", "~")) and not Path(folder).expanduser().is_dir():
            raise ConfigurationError(f"{setting} = {folder!r}: there is no such folder")
