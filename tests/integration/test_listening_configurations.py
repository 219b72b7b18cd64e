"""Inventory of `holdfast serve` in each configuration: what listens on which address, and nothing else."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.listening import counted, listeners
from tests.integration.live_cluster.test_listening import LOOPBACK, OF_RAY, check_unix_sockets
from tests.integration.test_commands import Command, start

__all__ = ["start"]  # a fixture

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

WIDE = "0.0.0.0"


def expected(tp: int, host: str) -> Counter[tuple[str, str, str]]:
    """Of one router and one replica. `--host` is for gRPC, HTTP and the engine protocol alone."""
    of_grpc = "::" if host == WIDE else host  # gRPC takes 0.0.0.0 for every address of either family
    of_clients = Counter({("Router", "tcp", host): 1})
    of_clients += Counter({("Router", "tcp", of_grpc): 1, ("Replica", "tcp", of_grpc): 1})
    own = {"Directory": 2, "Router": 3, "Replica": 3, "RankActor": tp - 1, "starter": 1}
    of_clients += Counter({("starter", "unix", "forks"): 1})  # of the fork server
    return OF_RAY + of_clients + Counter({(name, "tcp", LOOPBACK): number for name, number in own.items()})


@pytest.mark.parametrize("security", ["plain", "keys", "tls"])
@pytest.mark.parametrize(("host", "tp"), [(None, 1), (LOOPBACK, 2), (WIDE, 2)])
def test_each_configuration_listens_where_it_says(
    host: str | None, tp: int, security: str, start: Callable[..., Command], tmp_path: Path
):
    flags = ["--replicas", "1", "--routers", "1", "--tp", str(tp), "--engine-port", "0"]
    flags += ["--port", "0", "--http-port", "0", "--admin-port", "0"]
    flags += [] if host is None else ["--host", host]
    if security == "plain":
        flags += ["--insecure"] if host == WIDE else []
    else:
        start("holdfast.cluster.commands.cli", "keys", "add", "alice", "--file", str(tmp_path / "keys.json")).finish()
        flags += ["--api-keys", str(tmp_path / "keys.json")]
    if security == "tls":
        pair = Authority(tmp_path).pair("good")
        flags += ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    command = start("holdfast.cluster.commands.cli", "serve", *flags)
    command.wait_for(r"gRPC on (.*)")
    found = [one for one in listeners(command.descendants()) if one.process != "idle worker"]
    assert counted(found) == expected(tp, host or LOOPBACK)
    check_unix_sockets(found)
