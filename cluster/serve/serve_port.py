"""Port of Ray Serve's own in each process of a deployment: on the address of the node alone.

Serve opens it on every interface (`ray/serve/_private/replica.py`, `ReplicaBase._on_initialized`, read in Ray 2.60),
for calls between deployments over gRPC, and dials it by the node's address.
"""

from collections.abc import MutableMapping
from importlib.metadata import version
from typing import Any, Final

ANYWHERE: Final = "[::]:"


def listen_on_the_node_alone() -> None:
    """To be called while a deployment is made, in its process: Serve opens the port after that."""
    import ray
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    if getattr(add_port, "is_narrow", False):
        return
    host = ray.util.get_node_ip_address()

    def narrow(server: Any, address: str) -> Any:
        return add_port(server, on_host(address, host))

    narrow.is_narrow = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = narrow


def on_host(address: str, host: str) -> str:
    """`address`, or the same port of `host` where it stands for every interface."""
    if not address.startswith(ANYWHERE):
        return address
    return f"[{host}]:{address.removeprefix(ANYWHERE)}" if ":" in host else f"{host}:{address.removeprefix(ANYWHERE)}"


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
