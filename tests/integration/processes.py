"""The processes of Ray that a test has started, directly or not."""

import psutil


def ray_processes() -> list[psutil.Process]:
    """Everything of Ray that this process has started, directly or not."""
    return [process for process in psutil.Process().children(recursive=True) if "ray" in " ".join(process.cmdline())]


def processes_named(part: str) -> list[psutil.Process]:
    """Those of Ray whose title has `part` in it, such as `RankActor` or `:Directory`."""
    return [process for process in ray_processes() if part in " ".join(process.cmdline())]


def listening_ports(process: psutil.Process) -> set[int]:
    """The TCP ports that it serves."""
    return {link.laddr.port for link in process.net_connections() if link.status == psutil.CONN_LISTEN}
