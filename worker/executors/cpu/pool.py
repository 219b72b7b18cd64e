"""The native library's threads for the modules of one rank, and the memory of their packed weights."""

from contextlib import suppress
from ctypes import CDLL
from typing import Final

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.sampler import OUT_OF_MEMORY
from holdfast.worker.executors.cpu.tile_memory import Arena

_FORKED: Final = -1


class NativePool:
    """Used by one thread at a time."""

    def __init__(self, num_threads: int, library: CDLL | None = None) -> None:
        """`library`: another one than that of the machine's best class. Raises `Unavailable` where this machine does
        not run the native library.
        """
        self.library = library or load_library()
        self.arena = Arena()
        self.handle: int | None = self.library.native_pool_create(num_threads, -1, None)
        if not self.handle:
            raise ReplicaError(f"{num_threads} threads could not be started")

    def check(self, outcome: int, work: str) -> None:
        """Raises `ReplicaError` unless a call of the library has done its work, such as `a product`."""
        if outcome == OUT_OF_MEMORY:
            raise ReplicaError(f"there is no memory for {work}")
        if outcome == _FORKED:
            raise ReplicaError("this process was forked from the one that loaded the model, without its threads")
        if outcome < 0:
            raise ReplicaError(f"the native library's threads did not do {work} ({outcome})")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            with suppress(TypeError):  # at the interpreter's end
                self.library.native_pool_destroy(self.handle)
            self.handle = None
