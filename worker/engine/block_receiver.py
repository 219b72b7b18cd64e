"""The receiving end of a transfer of blocks over one connection (`block_sockets.py`)."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.worker.cache.sealing import WrongDigestError
from holdfast.worker.engine import transfer_key
from holdfast.worker.engine.block_frames import Block, received
from holdfast.worker.engine.frame_receiver import FrameMemory, FrameReceiver
from holdfast.worker.engine.staging import Reader, Way, reader_of
from holdfast.worker.engine.transfer_key import OFFER, READS, READS_NOT, TransferKey, shut, tune
from holdfast.worker.errors import ConfigurationError

LARGEST_OFFER: Final = 1 << 20  # bytes


class BlockReceiver:
    """Receives the blocks of one transfer on a separate thread."""

    def __init__(
        self,
        address: tuple[str, int],
        key: TransferKey,
        names: Sequence[bytes],
        on_blocks: Callable[[Sequence[Block]], bool],
        on_end: Callable[[Exception | None], None],
        way: Way | None = None,
        memory: FrameMemory | None = None,
    ) -> None:
        """`names` are those of the blocks in order. `on_blocks` takes correct blocks, in order; it returns whether more
        are wanted, and may wait. `on_end` is called once: with what went wrong, or None. `way`: how the sender's memory
        may be read. Frames come into `memory`, if it has memory of earlier ones.
        """
        self._address = address
        self._key = key
        self._names = names
        self._on_blocks = on_blocks
        self._on_end = on_end
        self._way = way
        self._memory = memory or FrameMemory()
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-blocks-in", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nothing more is wanted."""
        self._closed = True
        if self._connection is not None:
            shut(self._connection)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with socket.create_connection(self._address, transfer_key.HANDSHAKE_S) as connection:
                self._connection = connection
                connection.sendall(self._key.hello())
                tune(connection)
                self._receive(connection)
        except BlockingIOError:  # the kernel's word for the end of a wait
            error = None if self._closed else TimeoutError(f"nothing came for {transfer_key.STALL_S:g} s")
        except (OSError, EOFError, WrongDigestError, ValueError, ConfigurationError) as failure:
            error = None if self._closed else failure
        self._on_end(error)

    def _receive(self, connection: socket.socket) -> None:
        sealer = self._key.sealer
        reader = self._reader(connection)
        try:
            frames = FrameReceiver(connection, sealer, self._names, reader, self._memory, transfer_key.STALL_S)
            while not self._closed and not frames.is_complete:
                blocks = frames.next()
                if blocks is None or not self._on_blocks(blocks):
                    return
        finally:
            if reader is not None:
                reader.close()

    def _reader(self, connection: socket.socket) -> Reader | None:
        """Reads the sender's memory, if it has offered it and it can be read here."""
        (num_bytes,) = OFFER.unpack(received(connection, OFFER.size))
        if num_bytes > LARGEST_OFFER:
            raise ValueError(f"an offer of {num_bytes} bytes, where {LARGEST_OFFER} is the limit")
        if not num_bytes:
            return None
        reader = reader_of(self._way, received(connection, num_bytes))
        connection.sendall(READS_NOT if reader is None else READS)
        return reader
