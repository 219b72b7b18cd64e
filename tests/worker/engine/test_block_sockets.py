"""Block sockets: what comes is what was sent, to the end or not at all, and only for who has the key."""

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from holdfast.worker.cache import sealing
from holdfast.worker.cache.sealing import KeySealer, Sealer, WrongDigestError
from holdfast.worker.engine import block_frames, block_mover, frame_receiver, outgoing_blocks, transfer_key
from holdfast.worker.engine.block_receiver import BlockReceiver
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.frame_receiver import FrameReceiver
from holdfast.worker.engine.incoming_blocks import Taker
from holdfast.worker.engine.staging import SLOT_BYTES
from holdfast.worker.engine.tier_mover import KV
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.library import load_library

LIMIT_S = 20.0
NAMES = [b"k" + bytes([number]) * 16 for number in range(6)]
ROWS = [np.frombuffer(os.urandom(5000 + number), np.uint8) for number in range(6)]
BLOCKS = list(zip(NAMES, ROWS, strict=True))


class Received:
    """A receiver's outcome."""

    def __init__(self, port: int, key: TransferKey, names: Sequence[bytes] = NAMES, most: int | None = None) -> None:
        self.blocks: list[tuple[bytes, bytes]] = []
        self.error: Exception | None = None
        self._most = most
        self._over = threading.Event()
        self.receiver = BlockReceiver(("127.0.0.1", port), key, names, self._take, self._end)
        self.receiver.start()

    def _take(self, blocks) -> bool:
        self.blocks += [(name, row.tobytes()) for name, row in blocks]
        return self._most is None or len(self.blocks) < self._most

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> "Received":
        assert self._over.wait(LIMIT_S)
        return self


@pytest.fixture
def server() -> Iterator[BlockServer]:
    server = BlockServer("127.0.0.1")
    yield server
    server.close()


def is_emptied(server: BlockServer) -> bool:
    """Whether nothing stays staged; a receiver may be done before the server has counted what it sent."""
    with server._changed:
        for _ in range(100):
            if not server.staged_bytes:
                return True
            server._changed.wait(LIMIT_S / 100)
    return False


def expected(count: int = len(BLOCKS)) -> list[tuple[bytes, bytes]]:
    return [(name, row.tobytes()) for name, row in BLOCKS[:count]]


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_come_in_order_and_whole(server, is_encrypted):
    key = TransferKey.fresh(is_encrypted=is_encrypted)
    server.offer(key)
    received = Received(server.port, key)
    server.send(key.transfer, BLOCKS[:4])
    server.send(key.transfer, BLOCKS[4:])
    assert received.wait().blocks == expected()
    assert received.error is None
    assert is_emptied(server)


def test_memory_of_a_frame_is_used_again_once_none_of_its_blocks_is():
    memory = frame_receiver.FrameMemory()
    first = memory.frame(100)
    row = np.frombuffer(first.data[10:20], np.uint8)
    address = first.ctypes.data
    del first
    kept = memory.frame(100)
    assert kept.ctypes.data != address, "a block of it is still used"
    del row
    again = memory.frame(60)
    assert (again.ctypes.data, again.size) == (address, 60)
    assert memory.frame(101).ctypes.data not in (address, kept.ctypes.data)


def test_what_was_sent_before_the_connection_came_is_kept(server):
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    server.send(key.transfer, BLOCKS)
    server.end(key.transfer)
    assert Received(server.port, key).wait().blocks == expected()


def test_an_end_before_all_is_no_error(server):
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    server.send(key.transfer, BLOCKS[:2])
    server.end(key.transfer)
    received = Received(server.port, key).wait()
    assert (received.blocks, received.error) == (expected(2), None)


def test_who_has_another_key_gets_nothing_and_who_has_the_key_still_does(server):
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    server.send(key.transfer, BLOCKS)
    forged = Received(server.port, TransferKey(key.transfer, os.urandom(32))).wait()
    assert (forged.blocks, type(forged.error)) == ([], EOFError)
    assert Received(server.port, key).wait().blocks == expected()


def test_a_receiver_that_cannot_decrypt_says_so_and_ends(server, monkeypatch):
    def missing(self: KeySealer, key: bytes) -> None:
        raise ConfigurationError("cache.kv_offload_key_file: needs the package cryptography")

    monkeypatch.setattr(KeySealer, "__init__", missing)
    key = TransferKey.fresh(is_encrypted=True)
    assert isinstance(Received(server.port, key).wait().error, ConfigurationError)


def test_a_rank_whose_connection_is_slow_keeps_no_more_than_its_bound(monkeypatch):
    monkeypatch.setattr(outgoing_blocks, "MAX_STAGED_BYTES", 3 * SLOT_BYTES)
    pool = BlockBytes([np.zeros((4, 64), np.uint8)], load_library())
    mover, key = block_mover.BlockMover(None, {KV: pool}), TransferKey.fresh(is_encrypted=False)
    port = mover.outgoing.listen("127.0.0.1")
    mover.outgoing.offer(1, [Taker(key)])
    for name in NAMES:
        mover.outgoing.send(1, [(name, 0)])
    assert len(Received(port, key).wait().blocks) == 3
    mover.close()


def test_a_transfer_has_one_connection(server):
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    first = Received(server.port, key)
    server.send(key.transfer, BLOCKS[:1])
    while not first.blocks:
        pass
    assert Received(server.port, key).wait().blocks == []
    server.send(key.transfer, BLOCKS[1:])
    assert first.wait().blocks == expected()


def test_a_transfer_that_is_not_known_ends_after_the_handshakes_time(server, monkeypatch):
    monkeypatch.setattr(transfer_key, "HANDSHAKE_S", 0.2)
    received = Received(server.port, TransferKey.fresh(is_encrypted=False)).wait()
    assert isinstance(received.error, EOFError)


def test_blocks_for_which_nobody_comes_are_forgotten(server, monkeypatch):
    monkeypatch.setattr(transfer_key, "HANDSHAKE_S", 0.05)
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    server.send(key.transfer, BLOCKS)
    assert server.staged_bytes > 0
    while server.staged_bytes:
        socket.create_connection(("127.0.0.1", server.port)).close()
    assert not server.is_open(key.transfer)


def test_a_receiver_that_goes_leaves_nothing_behind(server):
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    server.send(key.transfer, BLOCKS[:3])
    assert Received(server.port, key, most=2).wait().error is None
    while server.is_open(key.transfer):
        server.send(key.transfer, BLOCKS[3:4])
    assert is_emptied(server)


def test_a_server_that_closes_ends_its_connections():
    server = BlockServer("127.0.0.1")
    key = TransferKey.fresh(is_encrypted=False)
    server.offer(key)
    received = Received(server.port, key)
    server.send(key.transfer, BLOCKS[:1])
    while not received.blocks:
        pass
    server.close()
    assert isinstance(received.wait().error, EOFError | OSError)
    assert is_emptied(server)


class Forger:
    """A sender that sends these bytes."""

    def __init__(self, data: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._data = data
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(bytes(4) + self._data)  # it offers no memory


def frame(
    blocks=BLOCKS,
    count: int | None = None,
    change: int | None = None,
    lengths: list[int] | None = None,
    slot: int = block_frames.IN_LINE,
) -> bytes:
    records = [b"".join(map(bytes, Sealer().seal(name, row.data))) for name, row in blocks]
    payload = bytearray(b"".join(records))
    if change is not None:
        payload[change] ^= 1
    sizes = lengths or [len(record) for record in records]
    count = len(records) if count is None else count
    return struct.pack("<IQi", count, len(payload), slot) + struct.pack(f"<{len(sizes)}I", *sizes) + bytes(payload)


def test_a_small_frame_behind_a_large_one_is_not_waited_for_in_vain(monkeypatch):
    """Whoever waits for a large frame is woken for many bytes alone; the next head has few."""
    get, woken_for = FrameReceiver._next_bytes, list[int]()

    def noted(self: FrameReceiver, num_bytes: int) -> bytes:
        found = get(self, num_bytes)
        woken_for.append(self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
        return found

    monkeypatch.setattr(FrameReceiver, "_next_bytes", noted)
    large = [(NAMES[0], np.frombuffer(os.urandom(3 * frame_receiver.WAKE_BYTES), np.uint8))]
    data = frame(large) + frame(BLOCKS[1:])
    received = Received(Forger(data).port, TransferKey.fresh(is_encrypted=False)).wait()
    assert received.error is None
    assert received.blocks == [(NAMES[0], large[0][1].tobytes()), *expected()[1:]]
    assert set(woken_for) == {1}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (frame(change=0), WrongDigestError),
        (frame(change=-1), WrongDigestError),
        (frame([BLOCKS[1], BLOCKS[0]]), WrongDigestError),  # right bytes under another name
        (frame()[:-1], EOFError),
        (frame()[:7], EOFError),
        (frame(count=7), ValueError),
        (struct.pack("<IQi", 1, 1 << 40, -1), ValueError),
        (frame(lengths=[1] * 6), ValueError),
        (frame(slot=0), ValueError),  # where no memory was offered
        (struct.pack("<IQi", 1, 3, -1) + struct.pack("<I", 3) + b"abc", WrongDigestError),
    ],
)
def test_what_is_not_right_is_not_taken(data, error):
    received = Received(Forger(data).port, TransferKey.fresh(is_encrypted=False)).wait()
    assert (received.blocks, type(received.error)) == ([], error)


def test_nothing_is_taken_of_a_frame_with_one_wrong_block_but_what_came_before_is():
    data = frame(BLOCKS[:2]) + frame(BLOCKS[2:], change=20)
    received = Received(Forger(data).port, TransferKey.fresh(is_encrypted=False)).wait()
    assert (received.blocks, type(received.error)) == (expected(2), WrongDigestError)


def test_a_planted_digest_that_is_not_checked_lets_a_changed_block_through(monkeypatch):
    monkeypatch.setattr(sealing, "_digest", lambda name, data: bytes(16))
    received = Received(Forger(frame(change=0)).port, TransferKey.fresh(is_encrypted=False), NAMES).wait()
    assert received.blocks
    assert received.blocks != expected()


# --- a link that is cut in mid-transfer, between two network namespaces ---

END = """
import sys
import numpy as np
from holdfast.worker.engine import block_receiver, block_sockets, transfer_key
transfer_key.STALL_S = 2.0
key = transfer_key.TransferKey(b"t" * 16, b"k" * 32)
blocks = [(b"k" + bytes([number]) * 16, np.full(1 << 20, number, np.uint8)) for number in range(40)]
"""
SENDER = """
server = block_sockets.BlockServer("10.77.0.1")
server.offer(key)
print(server.port, flush=True)
server.send(key.transfer, blocks[:4])
sys.stdin.readline()
server.send(key.transfer, blocks[4:])
while server.is_open(key.transfer):
    with server._changed:
        server._changed.wait(0.1)
print(server.staged_bytes, len(server._connections), flush=True)
"""
RECEIVER = """
import threading
over = threading.Event()
def take(found):
    for name, row in found:
        assert (row == name[1]).all()
        print(name[1], flush=True)
    return True
def end(error):
    print(type(error).__name__, flush=True)
    over.set()
port = int(sys.stdin.readline())
block_receiver.BlockReceiver(("10.77.0.1", port), key, [name for name, _ in blocks], take, end).start()
over.wait()
"""


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces are made by root")
    names = f"hf-a-{os.getpid()}", f"hf-b-{os.getpid()}"
    ends = f"va{os.getpid() % 10**6}", f"vb{os.getpid() % 10**6}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LIMIT_S)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=LIMIT_S)


@pytest.mark.slow
def test_a_link_that_is_cut_in_mid_transfer_ends_both_sides_and_holds_nothing(two_hosts):
    def run(host: str, program: str) -> subprocess.Popen:
        command = ["ip", "netns", "exec", host, sys.executable, "-c", END + program]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with run(two_hosts[0], SENDER) as sender, run(two_hosts[1], RECEIVER) as receiver:
        try:
            receiver.stdin.write(sender.stdout.readline())
            receiver.stdin.flush()
            assert [int(receiver.stdout.readline()) for _ in range(4)] == [0, 1, 2, 3]
            link = f"vb{os.getpid() % 10**6}"
            subprocess.run(["ip", "-n", two_hosts[1], "link", "set", link, "down"], check=True, timeout=LIMIT_S)
            sender.stdin.write("on\n")
            sender.stdin.flush()
            assert receiver.stdout.readline() == "TimeoutError\n", "it is told, and of no block that is not whole"
            assert sender.stdout.readline() == "0 0\n", "nothing is staged, and no connection is open"
        finally:
            sender.kill()
            receiver.kill()
