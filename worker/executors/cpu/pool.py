"""Threads of the native library: those of one rank, which its executors and the products of its modules share."""

from contextlib import suppress
from ctypes import CDLL

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.tile_memory import Arena


class NativePool:
    """Used by one thread at a time. Its threads end when it is closed and nothing that runs on them is open any more:
    the garbage collector ends objects that it finds together in any order.
    """

    def __init__(self, num_threads: int, library: CDLL | None = None) -> None:
        """`library`: another one than that of the machine's best class. Raises `Unavailable` where this machine does
        not run the native library, and `ReplicaError` if the threads cannot be started.
        """
        self.library = library or load_library()
        self.arena = Arena()
        """Memory of weights that live as long as this does."""
        self._num_users = 0
        self._is_closed = False
        self.handle: int | None = self.library.native_pool_create(num_threads, -1, None)
        if not self.handle:
            raise ReplicaError(f"{num_threads} threads could not be started")

    def begin_use(self) -> None:
        """Keeps the threads until `end_use`."""
        self._num_users += 1

    def end_use(self) -> None:
        """Ends the threads, if it is closed and this was the last user."""
        self._num_users -= 1
        self._end_if_unused()

    def close(self) -> None:
        """Ends the threads, or leaves that to the last user. Not during a step."""
        self._is_closed = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.handle and self._is_closed and not self._num_users:
            self.library.native_pool_destroy(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            with suppress(TypeError):  # at the interpreter's end
                self.close()
