"""Blocks that a receiver reads from its sender's memory: what comes is what was sent, or the connection brings it."""

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from holdfast.worker.cache.sealing import Sealer, WrongDigestError
from holdfast.worker.engine import nixl_way
from holdfast.worker.engine.block_frames import MAX_SLOTS, Block, FrameReceiver, FrameSender
from holdfast.worker.engine.block_sockets import BlockReceiver, BlockServer, TransferKey
from holdfast.worker.engine.nixl_way import Nixl
from holdfast.worker.engine.staging import LINE_BYTES, SLOT_BYTES, SharedMemory, StagedFrame, Staging, Way
from holdfast.worker.errors import ConfigurationError
from tests import fake_nixl

LIMIT_S = 60.0
ROW_BYTES = 300_000
NAMES = [b"k" + bytes([number]) * 16 for number in range(50)]
BLOCKS = [(name, np.frombuffer(os.urandom(ROW_BYTES), np.uint8)) for name in NAMES]


def shared_memory(monkeypatch) -> tuple[Way, Way]:
    return SharedMemory(), SharedMemory()


def nixl(monkeypatch) -> tuple[Way, Way]:
    fake_nixl.install(monkeypatch)
    return Nixl(), Nixl()


def installed_nixl(monkeypatch) -> tuple[Way, Way]:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("the package nixl is not installed")
    return Nixl(), Nixl()


@contextmanager
def sent(
    ways: tuple[Way | None, Way | None], blocks: Sequence[Block] = BLOCKS, *, is_encrypted: bool = False
) -> Iterator[tuple[list[tuple[bytes, bytes]], Exception | None, BlockServer]]:
    """What a receiver has got of these blocks, how it has ended, and the server."""
    server, key = BlockServer("127.0.0.1", None, ways[0], ROW_BYTES), TransferKey.fresh(is_encrypted=is_encrypted)
    found: list[tuple[bytes, bytes]] = []
    ended: list[Exception | None] = []
    over = threading.Event()

    def take(some: Sequence[Block]) -> bool:
        found.extend((name, row.tobytes()) for name, row in some)
        return True

    def end(error: Exception | None) -> None:
        ended.append(error)
        over.set()

    server.offer(key)
    server.send(key.transfer, blocks[:20])
    server.send(key.transfer, blocks[20:])
    server.end(key.transfer)
    names = [*(name for name, _ in blocks), b"k" + bytes(16)]  # the sender's end is waited for
    BlockReceiver(("127.0.0.1", server.port), key, names, take, end, ways[1]).start()
    assert over.wait(LIMIT_S)
    yield found, ended[0], server
    server.close()


def expected(blocks: Sequence[Block] = BLOCKS) -> list[tuple[bytes, bytes]]:
    return [(name, row.tobytes()) for name, row in blocks]


def are_given_back(server: BlockServer) -> bool:
    """Whether all slots are free once the connection has ended."""
    with server._changed:
        assert server._changed.wait_for(lambda: not server._connections, LIMIT_S)
    return server._staging.num_free == server._staging.num_bytes // server._staging.slot_bytes


def note_in_line(monkeypatch) -> list[int]:
    """Numbers of blocks that go over the connection."""
    counts: list[int] = []
    send = FrameSender._send_in_line

    def noted(self: FrameSender, blocks: Sequence[Block]) -> None:
        counts.append(len(blocks))
        send(self, blocks)

    monkeypatch.setattr(FrameSender, "_send_in_line", noted)
    return counts


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("make", [shared_memory, nixl, installed_nixl])
def test_blocks_are_read_from_the_senders_memory(make, is_encrypted, monkeypatch):
    in_line = note_in_line(monkeypatch)
    ways = make(monkeypatch)
    for _ in range(2):
        with sent(ways, is_encrypted=is_encrypted) as (found, error, server):
            assert (found, error) == (expected(), None)
            assert are_given_back(server)
            staged = server._staging.memory.tobytes()
            assert any(row[:64] in staged for _, row in found[-2:]) is not is_encrypted
    assert not in_line


def test_a_block_that_is_larger_than_a_slot_comes_over_the_connection(monkeypatch):
    in_line = note_in_line(monkeypatch)
    large = (b"k" + b"l" * 16, np.frombuffer(os.urandom(SLOT_BYTES), np.uint8))
    blocks = [BLOCKS[0], large, BLOCKS[1]]
    with sent(shared_memory(monkeypatch), blocks) as (found, error, _):
        assert (found, error) == (expected(blocks), None)
    assert in_line == [1]


def test_without_a_free_slot_blocks_come_over_the_connection(monkeypatch):
    in_line = note_in_line(monkeypatch)
    monkeypatch.setattr(Staging, "take", lambda self: None)
    with sent(shared_memory(monkeypatch)) as (found, error, _):
        assert (found, error) == (expected(), None)
    assert sum(in_line) == len(BLOCKS)


def other_host(monkeypatch) -> tuple[Way, Way]:
    """A process of the same number there has a file of the same name, and another tag."""
    offer = SharedMemory.offer
    monkeypatch.setattr(SharedMemory, "offer", lambda self, staging: {**offer(self, staging), "tag": "00" * 32})
    return shared_memory(monkeypatch)


def no_such_file(monkeypatch) -> tuple[Way, Way]:
    monkeypatch.setattr(SharedMemory, "offer", lambda self, staging: {"process": 1, "file": 10**6, "tag": ""})
    return shared_memory(monkeypatch)


def malformed(monkeypatch) -> tuple[Way, Way]:
    monkeypatch.setattr(SharedMemory, "offer", lambda self, staging: {"process": "x"})
    return shared_memory(monkeypatch)


def other_ways(monkeypatch) -> tuple[Way, Way]:
    return shared_memory(monkeypatch)[0], nixl(monkeypatch)[1]


def one_way(monkeypatch) -> tuple[Way | None, Way | None]:
    return SharedMemory(), None


def unreachable_agent(monkeypatch) -> tuple[Way, Way]:
    ways = nixl(monkeypatch)
    monkeypatch.setattr(fake_nixl.nixl_agent, "get_agent_metadata", lambda self: b"of another release")
    return ways


@pytest.mark.parametrize("make", [other_host, no_such_file, malformed, other_ways, one_way, unreachable_agent])
def test_what_cannot_be_read_comes_over_the_connection(make, monkeypatch):
    in_line = note_in_line(monkeypatch)
    with sent(make(monkeypatch)) as (found, error, server):
        assert (found, error) == (expected(), None)
        assert are_given_back(server)
    assert sum(in_line) == len(BLOCKS)


@pytest.mark.parametrize("make", [shared_memory, nixl])
def test_a_slot_that_was_changed_is_not_taken(make, monkeypatch):
    take, copy, taken_slots = Staging.take, np.copyto, list[int | None]()

    def damaged(into, source, *args) -> None:
        copy(into, source)
        into[7] ^= 1

    def taken(self: Staging) -> int | None:
        taken_slots.append(take(self))
        if len(taken_slots) == 6:
            monkeypatch.setattr(np, "copyto", damaged)
        return taken_slots[-1]

    monkeypatch.setattr(Staging, "take", taken)
    with sent(make(monkeypatch)) as (found, error, server):
        assert isinstance(error, WrongDigestError)
        assert found == expected()[: len(found)]
        assert are_given_back(server)


@pytest.mark.parametrize("state", ["ERR", "PROC"])
def test_a_read_by_nixl_that_fails_ends_the_transfer_and_its_memory_stays_if_it_may_still_be_written_to(
    state, monkeypatch
):
    monkeypatch.setattr(nixl_way, "READ_S", 0.05)
    fake_nixl.install(monkeypatch, state=state, can_release=False)
    sender, receiver = Nixl(), Nixl()
    with sent((sender, receiver)) as (found, error, server):
        assert found == []
        assert isinstance(error, OSError)
        assert "NIXL" in str(error)
        assert are_given_back(server)
    agent = fake_nixl.AGENTS[receiver.agent.name]
    assert not agent.remote, "the peer is left"
    assert bool(agent.registered) is bool(receiver.unfinished) is (state == "PROC")


def test_a_slot_outside_of_the_memory_is_not_read(monkeypatch):
    reader = SharedMemory().reader(offer_of_a(Staging(ROW_BYTES)))
    with pytest.raises(ValueError, match="16 slots"):
        list(reader.read(16, np.empty(10, np.uint8)))
    with pytest.raises(ValueError, match="slot 0"):
        list(reader.read(0, np.empty(SLOT_BYTES + 1, np.uint8)))


def offer_of_a(staging: Staging) -> dict:
    return json.loads(json.dumps({"slot_bytes": staging.slot_bytes, **SharedMemory().offer(staging)}))


def test_no_more_slots_are_held_than_a_connection_may(monkeypatch):
    held: list[int] = []
    take = Staging.take

    def noted(self: Staging) -> int | None:
        slot = take(self)
        held.append(self.num_bytes // self.slot_bytes - self.num_free)
        return slot

    monkeypatch.setattr(Staging, "take", noted)
    with sent(shared_memory(monkeypatch)) as (found, _, _):
        assert found == expected()
    assert max(held) == MAX_SLOTS


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_rows_in_a_slot_and_where_they_are_read_begin_at_a_cache_line(is_encrypted, monkeypatch):
    places: list[int] = []
    monkeypatch.setattr(Staging, "frame", noted_rows(Staging.frame, places))
    blocks = [(name, row[: ROW_BYTES - 7 * number]) for number, (name, row) in enumerate(BLOCKS)]
    into: list[int] = []
    receive = FrameReceiver.next

    def noted_next(self: FrameReceiver) -> list[Block] | None:
        came = receive(self)
        into.extend(row.ctypes.data for _, row in came or ())
        return came

    monkeypatch.setattr(FrameReceiver, "next", noted_next)
    with sent(shared_memory(monkeypatch), blocks, is_encrypted=is_encrypted) as (found, error, _):
        assert (found, error) == (expected(blocks), None)
    assert len(places) == len(into) == len(blocks)
    assert not any(address % LINE_BYTES for address in (*places, *into))


def noted_rows(
    frame: Callable[..., StagedFrame | None], found: list[int]
) -> Callable[[Staging, Sequence[tuple[bytes, int]], type[Sealer]], StagedFrame | None]:
    """Makes frames, and notes the addresses of their rows."""

    def noted(self: Staging, blocks: Sequence[tuple[bytes, int]], form: type[Sealer]) -> StagedFrame | None:
        made = frame(self, blocks, form)
        assert made is not None
        found.extend(row.ctypes.data for row in made.rows)
        return made

    return noted


def staged(server: BlockServer, key: TransferKey) -> StagedFrame:
    """A frame of the first three blocks."""
    frame = server.frame(key, NAMES[:3], ROW_BYTES)
    assert frame is not None
    for place, (_, row) in zip(frame.rows, BLOCKS, strict=False):
        place[:] = row
    return frame


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_that_were_copied_into_a_slot_are_sent_from_there(is_encrypted, monkeypatch):
    send = BlockServer.send

    def in_a_frame(self: BlockServer, transfer: bytes, blocks: Sequence[Block]) -> None:
        key = self._open[transfer].key
        send(self, transfer, staged(self, key) if blocks else blocks)

    monkeypatch.setattr(BlockServer, "send", in_a_frame)
    for ways in (shared_memory(monkeypatch), (None, None)):
        with sent(ways, BLOCKS[:3], is_encrypted=is_encrypted) as (found, error, server):
            assert (found[:3], error) == (expected(BLOCKS[:3]), None)
            assert are_given_back(server)


def test_a_frame_of_a_transfer_that_is_over_gives_its_slot_back():
    server, key = BlockServer("127.0.0.1", None, None, ROW_BYTES), TransferKey.fresh(is_encrypted=False)
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
    send = FrameSender.send

    def slow(self: FrameSender, blocks: StagedFrame) -> None:
        begun.set()
        assert may_end.wait(LIMIT_S)
        send(self, blocks)

    monkeypatch.setattr(FrameSender, "send", slow)
    server, key = BlockServer("127.0.0.1", None, None, ROW_BYTES), TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    frame = staged(server, key)
    server.send(key.transfer, frame)
    BlockReceiver(("127.0.0.1", server.port), key, NAMES[:3], lambda _: True, lambda _: None).start()
    assert begun.wait(LIMIT_S)
    server.end(key.transfer)
    with server._changed:
        server._forget(key.transfer)
    assert not set(server._staging._free) & {frame.slot}
    may_end.set()
    assert are_given_back(server)
    server.close()


def test_nixl_that_is_not_installed_is_said_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(ConfigurationError, match=r"cache.kv_transfer_way = 'nixl': needs the package nixl"):
        Nixl()


def test_nixl_without_ucx_is_said_by_name(monkeypatch):
    fake_nixl.install(monkeypatch, backends=())
    with pytest.raises(ConfigurationError, match="no backend UCX"):
        Nixl()
