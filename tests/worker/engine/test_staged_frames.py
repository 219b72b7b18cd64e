"""Frames that one thread copies into slots and another sends: who has which slots, and who is told of room."""

import select
import socket
import struct
import threading
from collections.abc import Sequence

import pytest

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.engine import transfer_key
from holdfast.worker.engine.block_frames import Block, FrameSender
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.block_sockets import STAGED_BYTES, BlockServer, _Outgoing
from holdfast.worker.engine.staging import SharedMemory, StagedFrame, Staging
from holdfast.worker.engine.transfer_key import TransferKey
from tests.worker.engine.test_staging import (
    BLOCKS,
    LIMIT_S,
    NAMES,
    NUM_SLOTS,
    POOL,
    ROW_BYTES,
    _however_slow,  # noqa: F401 - for all tests here too
    are_given_back,
    expected,
    sent,
    shared_memory,
)


def staged(server: BlockServer, key: TransferKey, *, past_caches: bool = False) -> StagedFrame:
    """A frame of the first three blocks."""
    frame = server.frame(key, NAMES[:3], ROW_BYTES)
    assert frame is not None
    frame.fill(POOL, [0, 1, 2], past_caches=past_caches)
    return frame


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_that_were_copied_into_slots_are_sent_from_there(is_encrypted, past_caches, monkeypatch):
    send = BlockServer.send

    def in_a_frame(self: BlockServer, transfer: bytes, blocks: Sequence[Block]) -> None:
        key = self._open[transfer].key
        send(self, transfer, staged(self, key, past_caches=past_caches) if blocks else blocks)

    monkeypatch.setattr(BlockServer, "send", in_a_frame)
    for ways in (shared_memory(monkeypatch), (None, None)):
        with sent(ways, BLOCKS[:3], is_encrypted=is_encrypted) as (found, error, server):
            assert (found[:3], error) == (expected(BLOCKS[:3]), None)
            assert are_given_back(server)


def test_a_frame_of_a_transfer_that_is_over_gives_its_slot_back():
    server, key = BlockServer("127.0.0.1"), TransferKey.fresh(is_encrypted=False)
    server.send(key.transfer, staged(server, key))
    assert are_given_back(server)
    server.offer(key)
    server.send(key.transfer, staged(server, key))
    assert not are_given_back(server)
    server.close()
    assert are_given_back(server)


def test_a_frame_that_is_being_sent_keeps_its_slot_though_the_transfer_is_forgotten(monkeypatch):
    """Else another block could be copied into it before its digest is computed, and would go by this one's name."""
    begun, may_end = threading.Event(), threading.Event()
    send = FrameSender.send_staged

    def slow(self: FrameSender, frame: StagedFrame) -> None:
        begun.set()
        assert may_end.wait(LIMIT_S)
        send(self, frame)

    monkeypatch.setattr(FrameSender, "send_staged", slow)
    server, key = BlockServer("127.0.0.1"), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    frame = staged(server, key)
    server.send(key.transfer, frame)
    BlockReceiver(("127.0.0.1", server.port), key, NAMES[:3], lambda _: True, lambda _: None).start()
    assert begun.wait(LIMIT_S)
    server.end(key.transfer)
    with server._changed:
        server._forget(key.transfer)
    assert server._staging.num_free == NUM_SLOTS - len(frame.slots)
    may_end.set()
    assert are_given_back(server)
    server.close()


def listener(server: BlockServer, key: TransferKey) -> socket.socket:
    """A receiver that says that it reads the sender's memory, and says nothing more by itself."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(key.hello())
    (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
    connection.recv(length, socket.MSG_WAITALL)
    connection.sendall(b"\x01")
    return connection


def filled(server: BlockServer, key: TransferKey) -> int:
    """Frames that there was room for."""
    count = 0
    while server.has_room and server.is_open(key.transfer):
        server.send(key.transfer, staged(server, key))
        count += 1
    return count


def test_room_is_told_of_once_frames_are_read_and_not_before():
    told = threading.Event()
    times: list[bool] = []

    def on_room() -> None:
        times.append(server.staged_bytes < STAGED_BYTES)
        told.set()

    server, key = BlockServer("127.0.0.1", on_room, SharedMemory()), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    with listener(server, key) as connection:
        assert filled(server, key) > 1
        assert not server.has_room
        told.clear()
        connection.sendall(b"\x01")
        assert told.wait(LIMIT_S / 2), "and not when the connection has stalled"
        assert server.has_room
        assert filled(server, key) == 1
        connection.sendall(b"\x01\x01")
        while not server.has_room:  # looks for itself
            pass
        assert all(times)
    assert are_given_back(server)
    server.close()


def test_room_that_comes_just_before_a_connection_waits_is_told_of(monkeypatch):
    """The receiver has read a frame after the connection woke up, and before it waits again."""
    told, is_read = threading.Event(), threading.Event()
    wait, take, has_waited = _Outgoing.await_news, FrameSender.take_words, threading.Event()
    monkeypatch.setattr(_Outgoing, "await_news", lambda *args: wait(*args) or has_waited.set())

    def takes(self: FrameSender) -> bool:
        comes_before_wait = threading.current_thread() is not threading.main_thread() and not has_waited.is_set()
        if comes_before_wait and server.staged_bytes >= STAGED_BYTES and not is_read.is_set():
            told.clear()
            connection.sendall(b"\x01")
            select.select([self._connection], [], [])
            is_read.set()
        has_waited.clear()
        return take(self)

    monkeypatch.setattr(FrameSender, "take_words", takes)
    server, key = BlockServer("127.0.0.1", told.set, SharedMemory()), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    with listener(server, key) as connection:
        filled(server, key)
        assert is_read.wait(LIMIT_S)
        assert told.wait(LIMIT_S / 2), "and not when the connection has stalled, after all of it"
    assert are_given_back(server)
    server.close()


@pytest.mark.parametrize(("says", "error"), [(b"", "has read nothing"), (b"\x01" * 60, "more frames than it was told")])
def test_a_receiver_that_reads_nothing_or_too_much_is_left(says, error, monkeypatch, caplog):
    if not says:
        monkeypatch.setattr(transfer_key, "STALL_S", 0.1)
    caplog.set_level("INFO", logger="holdfast.worker.engine")
    server, key = BlockServer("127.0.0.1", None, SharedMemory()), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    with listener(server, key) as connection:
        filled(server, key)
        connection.sendall(says)
        assert are_given_back(server)
    assert not server.staged_bytes
    assert error in caplog.text
    server.close()


def test_words_too_many_end_the_connection_whichever_thread_reads_them():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(LIMIT_S)
        frames = FrameSender(ours, Sealer(), Staging(), is_read=True)
        theirs.sendall(b"\x01")
        with pytest.raises(ValueError, match="more frames than it was told"):
            frames.take_words()
        assert ours.recv(1) == b""


def test_a_receiver_that_has_all_and_leaves_is_no_error(caplog):
    caplog.set_level("INFO", logger="holdfast.worker.engine")
    server, key = BlockServer("127.0.0.1", None, SharedMemory()), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    with listener(server, key) as connection:
        count = filled(server, key)
        connection.sendall(b"\x01" * count)
        connection.shutdown(socket.SHUT_WR)
        assert are_given_back(server)
    assert not caplog.records
    server.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_frame_goes_at_once_from_the_thread_that_copied_it_unless_it_must_be_encrypted(is_encrypted, monkeypatch):
    by_itself = threading.Event()
    wait, send = _Outgoing.await_news, FrameSender.send_staged
    threads: list[int] = []
    monkeypatch.setattr(_Outgoing, "await_news", lambda *args: by_itself.set() or wait(*args))
    monkeypatch.setattr(FrameSender, "send_staged", lambda *args: threads.append(threading.get_ident()) or send(*args))
    server, key = BlockServer("127.0.0.1", None, SharedMemory()), TransferKey.fresh(is_encrypted=is_encrypted)
    server.offer(key)
    found: list[bytes] = []
    over = threading.Event()
    BlockReceiver(
        ("127.0.0.1", server.port),
        key,
        NAMES[:3],
        lambda some: not found.extend(row.tobytes() for _, row in some),
        lambda _: over.set(),
        SharedMemory(),
    ).start()
    assert by_itself.wait(LIMIT_S)
    server.send(key.transfer, staged(server, key))
    assert over.wait(LIMIT_S)
    assert found == [row.tobytes() for _, row in BLOCKS[:3]]
    assert len(threads) == is_encrypted
    server.close()
