"""Which of gRPC's threads read a connection that a process has dialled, as routers dial replicas.

What may live here: that one setting, which gRPC takes from the environment alone, when it is imported. What may not:
options of a channel (`router/links/link.py`), other settings of processes (`local.py`).
"""

from collections.abc import MutableMapping
from importlib.metadata import version
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
ON_ONE_THREAD: Final = "-event_engine_client"
LAST_KNOWN: Final = (1, 85)
"""Of gRPC, by major and minor version: a later one may not know the name, and would complain of it."""


def read_on_one_thread(environ: MutableMapping[str, str], installed: str = "") -> None:
    """Has processes with this environment read with the thread that completes calls, as gRPC did for years.

    Else a pool of threads reads, which wake one another several times for each message: 4 to 11 % of a router's CPU.
    What is set already stays. `installed` is the version of gRPC, as it calls itself.
    """
    major, minor = map(int, (installed or version("grpcio")).split(".")[:2])
    if (major, minor) <= LAST_KNOWN:
        environ.setdefault(VARIABLE, ON_ONE_THREAD)
