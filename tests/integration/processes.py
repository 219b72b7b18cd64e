"""The processes of Ray that a test has started, directly or not, and the ports that they serve."""

import random
import socket

import psutil


def ray_processes() -> list[psutil.Process]:
    """Everything of Ray that this process has started, directly or not."""
    return [process for process in psutil.Process().children(recursive=True) if "ray" in command_of(process)]


def command_of(process: psutil.Process) -> str:
    """Its command line; empty where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one too
        return ""


def processes_named(part: str) -> list[psutil.Process]:
    """Those of Ray whose title has `part` in it, such as `RankActor` or `:Directory`."""
    return [process for process in ray_processes() if part in command_of(process)]


def listening_ports(process: psutil.Process) -> set[int]:
    """The TCP ports that it serves."""
    return {link.laddr.port for link in process.net_connections() if link.status == psutil.CONN_LISTEN}


def two_free_ports() -> int:
    """The first of them. A router that is replaced has to come back where clients look for it."""
    for port in range(random.randrange(20_000, 30_000), 32_000, 2):
        try:
            for candidate in (port, port + 1):
                socket.create_server(("127.0.0.1", candidate)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no two free ports next to each other")
