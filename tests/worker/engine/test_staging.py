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
from holdfast.worker.engine import frame_receiver, nixl_way, transfer_key
from holdfast.worker.engine.block_frames import MAX_FRAMES, Block, FrameSender
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.frame_receiver import FrameReceiver
from holdfast.worker.engine.nixl_way import Nixl
from holdfast.worker.engine.staging import (
    FRAME_BYTES,
    LINE_BYTES,
    SLOT_BYTES,
    STAGING_BYTES,
    SharedMemory,
    StagedFrame,
    Staging,
    Way,
)
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.block_layout import Bytes
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.library import load_library
from tests import fake_nixl

LIMIT_S = 60.0
NUM_SLOTS = STAGING_BYTES // SLOT_BYTES
ROW_BYTES = 300_000
NAMES = [b"k" + bytes([number]) * 16 for number in range(50)]
BLOCKS = [(name, np.frombuffer(os.urandom(ROW_BYTES), np.uint8)) for name in NAMES]


@pytest.fixture(autouse=True)
def _however_slow(monkeypatch):
    """No transfer ends because the machine is busy."""
    monkeypatch.setattr(transfer_key, "STALL_S", LIMIT_S)


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
    server, key = BlockServer("127.0.0.1", None, ways[0]), TransferKey.fresh(is_encrypted=is_encrypted)
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
    return server._staging.num_free == NUM_SLOTS


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


def test_a_block_that_is_larger_than_a_frame_comes_over_the_connection(monkeypatch):
    in_line = note_in_line(monkeypatch)
    large = (b"k" + b"l" * 16, np.frombuffer(os.urandom(FRAME_BYTES), np.uint8))
    blocks = [BLOCKS[0], large, BLOCKS[1]]
    with sent(shared_memory(monkeypatch), blocks) as (found, error, _):
        assert (found, error) == (expected(blocks), None)
    assert in_line == [1]


def test_without_a_free_slot_blocks_come_over_the_connection(monkeypatch):
    in_line = note_in_line(monkeypatch)
    monkeypatch.setattr(Staging, "_take", lambda self, count: None)
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


def damage_the_second(monkeypatch, *, check: Callable[..., bool]) -> None:
    """What comes of the second frame differs from what was sent by one bit."""
    num_frames = 0

    def damaged(source: Bytes, *args) -> bool:
        nonlocal num_frames
        num_frames += 1
        changed = source.copy()
        changed[7] ^= num_frames == 2
        return check(changed, *args)

    monkeypatch.setattr(frame_receiver, "copy_checked", damaged)


@pytest.mark.parametrize("make", [shared_memory, nixl])
def test_a_slot_that_was_changed_is_not_taken(make, monkeypatch):
    damage_the_second(monkeypatch, check=frame_receiver.copy_checked)
    with sent(make(monkeypatch)) as (found, error, server):
        assert isinstance(error, WrongDigestError)
        assert found == expected()[:20], "those of the first frame"
        assert are_given_back(server)


def test_planted_a_digest_that_is_not_checked_lets_a_changed_block_through(monkeypatch):
    check = frame_receiver.copy_checked
    damage_the_second(monkeypatch, check=lambda *args: check(*args) or True)
    with sent(shared_memory(monkeypatch)) as (found, error, _):
        assert error is None
        assert found != expected()
        assert [name for name, _ in found] == NAMES


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
    staging = Staging()
    reader = SharedMemory().reader(offer_of_a(staging))
    for slot, num_bytes in ((NUM_SLOTS, 1), (NUM_SLOTS - 1, SLOT_BYTES + 1), (-1, 10)):
        with pytest.raises(ValueError, match=f"where there are {NUM_SLOTS} slots"):
            reader.read(slot, num_bytes)
    assert len(reader.read(NUM_SLOTS - 1, SLOT_BYTES)) == SLOT_BYTES


def offer_of_a(staging: Staging) -> dict:
    return json.loads(json.dumps({"slot_bytes": SLOT_BYTES, **SharedMemory().offer(staging)}))


def test_no_more_frames_are_held_than_a_connection_may(monkeypatch):
    held: list[int] = []
    send = FrameSender.send_staged

    def noted(self: FrameSender, frame: StagedFrame) -> None:
        send(self, frame)
        held.append(len(self._unread))

    monkeypatch.setattr(FrameSender, "send_staged", noted)
    with sent(shared_memory(monkeypatch), BLOCKS * 3) as (found, _, _):
        assert found == expected(BLOCKS * 3)
    assert max(held) == MAX_FRAMES


def test_slots_in_a_row_are_found_again_once_they_are_free():
    staging = Staging()
    blocks = [(name, SLOT_BYTES // 2) for name in NAMES]
    frames = [staging.frame(blocks[:count], Sealer) for count in (31, 1, 31, 31, 31, 31)]
    firsts = [(0, 16), (16, 17), (17, 33), (33, 49), (49, 65)]
    assert [frame and frame.slots for frame in frames] == [*(range(*one) for one in firsts), None]
    for number in (0, 2):
        staging.give_back(frames[number].slots)
    assert staging.frame(blocks[:31], Sealer).slots == range(16), "the first ones"
    assert staging.frame(blocks[:29], Sealer).slots == range(17, 32)
    assert staging.frame(blocks[:33], Sealer) is None, "larger than any frame"


def test_blocks_stay_as_they_came_while_others_come():
    server, key = BlockServer("127.0.0.1", None, SharedMemory()), TransferKey.fresh(is_encrypted=False)
    kept: list[Block] = []
    over = threading.Event()
    server.offer(key)
    for first in range(0, len(BLOCKS), 5):
        server.send(key.transfer, BLOCKS[first : first + 5])
    BlockReceiver(
        ("127.0.0.1", server.port), key, NAMES, lambda some: not kept.extend(some), lambda _: over.set(), SharedMemory()
    ).start()
    assert over.wait(LIMIT_S)
    assert [(name, row.tobytes()) for name, row in kept] == expected()
    server.close()


def test_a_mapping_goes_with_its_sender():
    way, first, second = SharedMemory(), Staging(), Staging()
    for staging in (first, second, first):
        way.reader(offer_of_a(staging))
    assert len(way._mapped) == 2
    first.close()
    way.reader(offer_of_a(second))
    assert len(way._mapped) == 1


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


POOL = BlockBytes(
    [np.stack([row[part] for _, row in BLOCKS]) for part in (slice(100_000), slice(100_000, ROW_BYTES))], load_library()
)


def test_nixl_that_is_not_installed_is_said_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(ConfigurationError, match=r"cache.kv_transfer_way = 'nixl': needs the package nixl"):
        Nixl()


def test_nixl_without_ucx_is_said_by_name(monkeypatch):
    fake_nixl.install(monkeypatch, backends=())
    with pytest.raises(ConfigurationError, match="no backend UCX"):
        Nixl()
