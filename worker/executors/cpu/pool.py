"""Threads of the native library: those of one rank, which its executors and the products of its modules share."""

from contextlib import suppress
from ctypes import CDLL

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.tile_memory import Arena


class NativePool:
    """Used by one thread at a time."""

    def __init__(self, num_threads: int, library: CDLL | None = None) -> None:
        """`library`: another one than that of the machine's best class. Raises `Unavailable` where this machine does
        not run the native library, and `ReplicaError` if the threads cannot be started.
        """
        self.library = library or load_library()
        self.arena = Arena()
        """Memory of weights that live as long as this does."""
        self.handle: int | None = self.library.native_pool_create(num_threads, -1, None)
        if not self.handle:
            raise ReplicaError(f"{num_threads} threads could not be started")

    def close(self) -> None:
        """Ends the threads. Not during a step."""
        if self.handle:
            self.library.native_pool_destroy(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            with suppress(TypeError):  # at the interpreter's end
                self.close()
