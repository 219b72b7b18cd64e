"""Accepted connections: who they are with, and that one of them is closed while its neighbours go on."""

import socket

import grpc
import pytest

from holdfast.router.api.connection_guard import accepted, cut_off, num_descriptors
from holdfast.router.security.connection_budgets import Peer, peer_of
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import collected, expected, request, site


def test_peers_are_read_as_grpc_writes_them():
    assert peer_of("ipv4:127.0.0.1:54040") == Peer("127.0.0.1", 54040)
    assert peer_of("ipv6:%5B::1%5D:5") == peer_of("ipv6:[::1]:5") == Peer("::1", 5)
    assert peer_of("ipv6:%5B::ffff:10.0.0.1%5D:5") == Peer("10.0.0.1", 5)
    assert peer_of("ipv6:%5Bfe80::1%25eth0%5D:5") == Peer("fe80::1", 5)
    assert [peer_of(other) for other in ("", "unix:/tmp/x", "ipv4:x", "inproc:1")] == [None] * 4
    assert [str(Peer("::1", 5)), str(Peer("10.0.0.1", 5))] == ["[::1]:5", "10.0.0.1:5"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_one_connection_is_closed_and_no_other(host: str):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listening:
        port = listening.getsockname()[1]
        callers, taken = [], []
        for _ in range(2):
            callers.append(socket.create_connection(("127.0.0.1" if host == "::" else host, port)))
            taken.append(listening.accept()[0])
        peers = [Peer(*caller.getsockname()[:2]) for caller in callers]
        assert accepted({port}) == set(peers)
        before = num_descriptors()
        assert cut_off(peers[:1], {port}) == {peers[0]}
        assert cut_off(peers[:1], {port + 1}) == set()
        assert num_descriptors() == before  # no duplicate is left open
        assert callers[0].recv(1) == b""
        taken[1].sendall(b"x")
        assert callers[1].recv(1) == b"x"
        for one in (*callers, *taken):
            one.close()
        assert accepted({port}) == set()


@on_a_loop
async def test_calls_of_a_connection_that_is_closed_end_and_those_of_others_go_on():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        port = int(place.router.address.rpartition(":")[2])
        mine = accepted({port})
        async with grpc.aio.insecure_channel(
            place.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            other = type(place.stub)(channel).GenerateStream(request())
            stream = place.stub.GenerateStream(request())
            await replica.until(lambda: len(replica.running) == 2)
            assert cut_off(accepted({port}) - mine, {port})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collected(other)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await replica.until(lambda: len(replica.running) == 1)
        replica.resume()
        assert "".join(chunk.text for chunk in await collected(stream)) == expected("hello", 1, 8)[1]
