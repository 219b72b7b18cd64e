"""Key of a transfer of blocks, which both ends of a connection prove that they have, and their first messages
(`block_sockets.py`).
"""

import hmac
import secrets
import socket
import struct
from contextlib import suppress
from typing import Final, NamedTuple

from holdfast.worker.cache.sealing import KeySealer, Sealer

TRANSFER_BYTES: Final = 16
KEY_BYTES: Final = 32
HANDSHAKE_S: Final = 5.0
"""Time limit of a connection's hello, by when its transfer must be known."""
STALL_S: Final = 10.0
"""A connection on which nothing moves for so long is closed."""

MAGIC: Final = b"HFB4"
HELLO: Final = struct.Struct(f"<4s{TRANSFER_BYTES}s32s")
OFFER: Final = struct.Struct("<I")
READS, READS_NOT = b"\x01", b"\x00"


class TransferKey(NamedTuple):
    """Transfer of blocks between two replicas: its number, and the key that all ranks of both have."""

    transfer: bytes
    key: bytes
    is_encrypted: bool = False

    @classmethod
    def fresh(cls, *, is_encrypted: bool) -> "TransferKey":
        """A new key, for one transfer."""
        return cls(secrets.token_bytes(TRANSFER_BYTES), secrets.token_bytes(KEY_BYTES), is_encrypted)

    def of_rank(self, rank: int) -> "TransferKey":
        """The part of a transfer that this rank of the receiving replica gets: a connection for itself."""
        made = hmac.digest(self.key, self.transfer + rank.to_bytes(4, "little"), "sha512")
        return TransferKey(made[:TRANSFER_BYTES], made[-KEY_BYTES:], self.is_encrypted)

    @property
    def form(self) -> type[Sealer]:
        """Form of its records: what they have besides their blocks."""
        return KeySealer if self.is_encrypted else Sealer

    @property
    def sealer(self) -> Sealer:
        return KeySealer(self.key) if self.is_encrypted else Sealer()

    def hello(self) -> bytes:
        """First message of a connection: the transfer's id, and an HMAC-SHA256 under its key."""
        mac = hmac.digest(self.key, MAGIC + self.transfer, "sha256")
        return HELLO.pack(MAGIC, self.transfer, mac)


def tune(connection: socket.socket) -> None:
    """Sends words at once, even if those before are not confirmed: each end waits for the other's.

    Waits of `STALL_S` at most, kept by the kernel: a timeout of Python's costs a `poll` for each call, and lets the
    kernel move less by one, which takes a third of the throughput over loopback.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit = struct.pack("@ll", int(STALL_S), int(STALL_S % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def shut(end: socket.socket) -> None:
    """Ends its use, by whatever thread."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
