"""Ranks meet in spite of strangers at their sockets, and only with those who know the secret."""

import os
import select
import socket
import struct
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.worker.executors import rendezvous as rendezvous_module
from holdfast.worker.executors.rendezvous import MAX_CALLERS, Connections, RankListener, Rendezvous, call, meet
from holdfast.worker.executors.tensor_parallel import _served_store
from tests.in_thread import in_thread

HOST = "127.0.0.1"
LIMIT_S = 60.0


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def met(size: int, listener: RankListener, secret: str = "s" * 64) -> list[Future]:
    place = Rendezvous(host=HOST, port=listener.port, secret=secret)
    leader = in_thread(lambda: meet(0, size, place, LIMIT_S, listener=listener, notice=lambda: "news"))
    return [leader, *(in_thread(lambda rank=rank: meet(rank, size, place, LIMIT_S)) for rank in range(1, size))]


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_a_connection_to_each_other_one(size):
    ranks: list[Connections] = [future.result(LIMIT_S) for future in met(size, RankListener(HOST))]
    for rank, one in enumerate(ranks):
        assert list(one.peers) == [peer for peer in range(size) if peer != rank]
        assert one.notice == "news"
        for peer, connection in one.peers.items():
            connection.sendall(bytes([rank, peer]))
    for rank, one in enumerate(ranks):
        for peer, connection in one.peers.items():
            assert connection.recv(2) == bytes([peer, rank])


def test_strangers_at_the_meeting_hold_up_no_rank(monkeypatch):
    """Silent ones, more than are kept; resets; half a hello; a hello without the secret; an HTTP request."""
    monkeypatch.setattr(rendezvous_module, "HELLO_TIMEOUT_S", LIMIT_S)  # only their number is bounded here
    listener = RankListener(HOST)
    place = (HOST, listener.port)
    silent = [socket.create_connection(place) for _ in range(MAX_CALLERS + 10)]
    reset(socket.create_connection(place))
    half, wrong, page = (socket.create_connection(place) for _ in range(3))
    half.sendall(bytes(5))
    wrong.sendall(struct.pack("!i32s32s", 1, bytes(32), bytes(32)))
    page.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 50)
    ranks = [future.result(LIMIT_S) for future in met(2, listener)]
    assert [list(one.peers) for one in ranks] == [[1], [0]]
    for stranger in (*silent, half, wrong, page):
        stranger.settimeout(LIMIT_S)
        with suppress(ConnectionResetError):
            assert len(stranger.recv(100)) <= 32, "no more than a challenge"
            assert stranger.recv(1) == b"", "and then it is closed"


def test_a_silent_caller_is_closed_after_its_time(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "HELLO_TIMEOUT_S", 0.05)
    with RankListener(HOST) as listener, socket.create_connection((HOST, listener.port)) as silent:
        waiting = in_thread(lambda: listener.accept([1], "secret", 0.5))
        assert select.select([silent], [], [], LIMIT_S)[0]
        silent.settimeout(LIMIT_S)
        assert len(silent.recv(100)) == 32
        assert silent.recv(1) == b""
        with pytest.raises(TimeoutError, match="rank 1 did not come"):
            waiting.result(LIMIT_S)


def test_a_rank_without_the_secret_does_not_get_in_and_one_with_it_trusts_no_stranger():
    with RankListener(HOST) as listener:
        waiting = in_thread(lambda: listener.accept([1], "ours", 1.0))
        with pytest.raises(TimeoutError, match="no peer answered"):
            call(HOST, listener.port, 1, "theirs", 0.3)
        with pytest.raises(TimeoutError):
            waiting.result(LIMIT_S)
    with socket.create_server((HOST, 0)) as stranger:
        calling = in_thread(lambda: call(HOST, stranger.getsockname()[1], 1, "ours", LIMIT_S))
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(bytes(32))
            hello = connection.recv(68, socket.MSG_WAITALL)
            assert b"ours" not in hello
            connection.sendall(hello[-32:])  # its own proof is no answer to it
            with pytest.raises(PermissionError):
                calling.result(LIMIT_S)


def test_a_recorded_hello_does_not_work_again():
    with RankListener(HOST) as listener:
        wanted = [1, 2]
        waiting = in_thread(lambda: listener.accept(wanted, "ours", 1.0))
        challenge = bytes(32)
        with socket.create_connection((HOST, listener.port)) as again:
            claim = rendezvous_module._claim(2, challenge, bytes(32))
            proof = rendezvous_module._proof("ours", b"call", claim)
            again.sendall(rendezvous_module._HELLO.pack(2, bytes(32), proof))
            again.settimeout(LIMIT_S)
            received = again.recv(100)
            assert len(received) <= 32
            assert received == b"" or again.recv(1) == b""
        with pytest.raises(TimeoutError):
            waiting.result(LIMIT_S)


def test_nccls_store_listens_where_the_ranks_are_alone_and_holds_no_secret():
    store = _served_store(HOST, 1, LIMIT_S)
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    ours = [line[1] for line in listening if line[3] == "0A" and int(line[9]) in inodes]
    assert f"0100007F:{store.port:04X}" in ours
    assert not [line for line in Path("/proc/net/tcp6").read_text().splitlines() if f":{store.port:04X} 0000" in line]
    reader = dist.TCPStore(HOST, store.port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    assert not reader.check(["order-token"])


def _is_open(descriptor: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def test_the_secret_is_in_no_text():
    place = Rendezvous.at(HOST, 5)
    assert len(place.secret) == 64
    assert place.secret not in repr(place) + str(place)
    assert Rendezvous.at(HOST, 5).secret != place.secret
