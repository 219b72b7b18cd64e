"""NIXL: reads another rank's staging memory over UCX and what it finds, such as RDMA or shared memory, by the package
`nixl` (https://github.com/ai-dynamo/nixl), which is loaded only if the settings ask for it.
"""

import base64
import secrets
import threading
import time
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.engine.staging import FRAME_BYTES, STAGING_BYTES, Reader, Staging, check_slot, lines_of
from holdfast.worker.errors import ConfigurationError

BACKEND: Final = "UCX"
READ_S: Final = 10.0
"""Limit of one read."""
POLL_S: Final = 2e-5
"""Time between two looks at a read: NIXL tells of nothing by itself."""
_HOST_MEMORY: Final = "DRAM"


class Nixl:
    """One agent, which lends this rank's staging memory and reads that of others."""

    kind = "NIXL"

    def __init__(self) -> None:
        """Raises `ConfigurationError` where the package `nixl`, or its backend UCX, is not installed."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigurationError(
                f"cache.kv_transfer_way = 'nixl': needs the package nixl; pip install nixl ({error})"
            ) from error
        self.agent = nixl_agent(f"holdfast-{secrets.token_hex(8)}", nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self.agent.backends:
            raise ConfigurationError(f"cache.kv_transfer_way = 'nixl': the package nixl has no backend {BACKEND} here")
        self.lock = threading.Lock()
        """An agent is used by one thread at a time."""
        self._lent: dict[Staging, str] = {}
        """Metadata of this agent, by the staging memory that it has lent last."""
        self._peers: dict[str, int] = {}
        """Number of readers of each other agent."""
        self.unfinished: list[tuple[object, NDArray[np.uint8]]] = []
        """Memory and handles of reads that could not be ended: they must stay where they are."""

    def offer(self, staging: Staging) -> dict[str, Any]:
        address = staging.memory.ctypes.data
        with self.lock:
            if staging not in self._lent:
                self.agent.register_memory([(address, STAGING_BYTES, 0, "")], _HOST_MEMORY)
                self._lent[staging] = base64.b64encode(self.agent.get_agent_metadata()).decode()
            return {"agent": self._lent[staging], "address": address, "bytes": STAGING_BYTES}

    def reader(self, offer: dict[str, Any]) -> Reader:
        metadata = base64.b64decode(offer["agent"], validate=True)
        slots = int(offer["address"]), int(offer["slot_bytes"]), int(offer["bytes"])
        try:
            with self.lock:
                peer = self.agent.add_remote_agent(metadata)
                self._peers[peer] = self._peers.get(peer, 0) + 1
                return _NixlReader(self, peer, *slots)
        except Exception as error:  # whatever its native part raises: blocks then come over the connection
            raise OSError(f"NIXL does not reach the other replica: {error}") from error

    def leave(self, peer: str) -> None:
        """A reader of this peer is closed. Its lock is held."""
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]
            self.agent.remove_remote_agent(peer)


class _NixlReader:
    """Reads into registered memory, from which blocks are copied: a read that has failed may still write there."""

    def __init__(self, nixl: Nixl, peer: str, address: int, slot_bytes: int, num_bytes: int) -> None:
        self._nixl, self._peer = nixl, peer
        self._address, self._slot_bytes, self._num_bytes = address, slot_bytes, num_bytes
        self._landing = lines_of(FRAME_BYTES)
        self._registered = nixl.agent.register_memory([(self._landing.ctypes.data, FRAME_BYTES, 0, "")], _HOST_MEMORY)

    def read(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        check_slot(slot, num_bytes, self._slot_bytes, self._num_bytes)
        if num_bytes > FRAME_BYTES:
            raise ValueError(f"a frame of {num_bytes} bytes, where {FRAME_BYTES} is the limit")
        try:
            state = self._read(self._address + slot * self._slot_bytes, num_bytes)
        except Exception as error:  # whatever its native part raises
            raise OSError(f"a read by NIXL has failed: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL has read nothing for {READ_S:g} s" if state == "PROC" else "a read by NIXL has failed")
        return self._landing[:num_bytes]

    def _read(self, address: int, num_bytes: int) -> str:
        agent, lock = self._nixl.agent, self._nixl.lock
        ends_s = time.monotonic() + READ_S
        with lock:
            here = agent.get_xfer_descs([(self._landing.ctypes.data, num_bytes, 0)], _HOST_MEMORY)
            there = agent.get_xfer_descs([(address, num_bytes, 0)], _HOST_MEMORY)
            handle = agent.initialize_xfer("READ", here, there, self._peer)
        try:
            with lock:
                state: str = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < ends_s:
                time.sleep(POLL_S)
                with lock:
                    state = agent.check_xfer_state(handle)
        finally:
            self._release(handle)
        return state

    def _release(self, handle: Any) -> None:
        with self._nixl.lock:
            try:
                self._nixl.agent.release_xfer_handle(handle)
            except Exception:  # noqa: BLE001 - it cannot be ended, so its memory must stay
                self._nixl.unfinished.append((handle, self._landing))

    def close(self) -> None:
        with self._nixl.lock, suppress(Exception):
            if not any(memory is self._landing for _, memory in self._nixl.unfinished):
                self._nixl.agent.deregister_memory(self._registered)
            self._nixl.leave(self._peer)
