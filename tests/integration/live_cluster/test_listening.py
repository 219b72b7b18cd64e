"""Inventory of a live cluster of two ranks, without --host: what listens, where, and what it says to a stranger."""

import os
import stat
from collections import Counter

import grpc
import psutil
import pytest

from holdfast.cluster.serve.start_up import Serving
from tests.integration.listening import Listener, counted, listeners

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LOOPBACK = "127.0.0.1"

OF_RAY = Counter(
    {
        ("gcs_server", "tcp", LOOPBACK): 1,
        ("raylet", "tcp", LOOPBACK): 2,  # node manager, object manager
        ("raylet", "unix", "raylet"): 1,
        ("raylet", "unix", "plasma_store"): 1,
        ("ServeController", "tcp", LOOPBACK): 1,
    }
)
OF_CLUSTER = Counter(  # two routers, two replicas of two ranks, the directory; one port of each is Ray's core worker
    {
        ("Directory", "tcp", LOOPBACK): 2,  # and Serve's port
        ("Router", "tcp", LOOPBACK): 2 * 4,  # and Serve's port, gRPC, HTTP
        ("Replica", "tcp", LOOPBACK): 2 * 4,  # and Serve's port, link, engine protocol
        ("RankActor", "tcp", LOOPBACK): 2,
    }
)


@pytest.fixture(scope="module")
def found(cluster: Serving) -> list[Listener]:
    return listeners([psutil.Process(), *psutil.Process().children(recursive=True)])


def test_exactly_these_sockets_listen_and_all_on_loopback(found: list[Listener]):
    of_cluster = counted([one for one in found if one.process not in ("idle worker", "starter")])
    assert of_cluster == OF_RAY + OF_CLUSTER
    strange = [one for one in found if one.kind != "unix" and one.host != LOOPBACK]
    assert strange == []


def test_nobody_else_may_connect_to_the_unix_sockets(found: list[Listener]):
    check_unix_sockets(found)


def check_unix_sockets(found: list[Listener]) -> None:
    """Of those that listen: only this account may connect."""
    for one in found:
        if one.kind == "unix":
            assert not one.host.startswith("@"), one
            status = os.stat(one.host)
            assert status.st_uid == os.getuid(), one
            assert not stat.S_IMODE(status.st_mode) & 0o022, "to connect is to write"


def code_for(one: Listener, method: str) -> grpc.StatusCode:
    """What somebody without the token is told."""
    with grpc.insecure_channel(f"{one.host}:{one.port}") as channel:
        ask = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"", timeout=30)
        code: grpc.StatusCode = refused.value.code()
        return code


def test_ray_refuses_a_stranger(found: list[Listener]):
    """What has no token: UNAUTHENTICATED, before anything is read."""
    asked = [
        *((one, "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo") for one in found if one.process == "gcs_server"),
        *((one, "/ray.rpc.CoreWorkerService/NumPendingTasks") for one in found if one.process == "RankActor"),
        *((one, "/ray.rpc.CoreWorkerService/NumPendingTasks") for one in found if one.process == "ServeController"),
    ]
    assert len(asked) == 4
    for one, method in asked:
        assert code_for(one, method) is grpc.StatusCode.UNAUTHENTICATED, one


def test_each_port_of_a_raylet_refuses_a_stranger(found: list[Listener]):
    """One has the node manager, the other the object manager, and neither knows the other's methods."""
    ports = [one for one in found if (one.process, one.kind) == ("raylet", "tcp")]
    assert len(ports) == 2
    for one in ports:
        codes = {
            code_for(one, "/ray.rpc.NodeManagerService/GetNodeStats"),
            code_for(one, "/ray.rpc.ObjectManagerService/Pull"),
        }
        assert codes == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}, one
