"""A free TCP port, for servers that need a port number before they listen."""

import socket


def pick_port(host: str = "127.0.0.1") -> int:
    """One that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
