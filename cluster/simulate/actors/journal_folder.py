"""Journal folder of a simulated machine: the reading journals of its routers, which outlive their processes."""

from collections.abc import Callable, Iterator

from holdfast.router.requests.reading_journal import SIZE


class JournalFolder:
    """Folder of one machine, on which all routers of a simulation run."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}
        self._ended: list[str] = []
        self._watchers: dict[str, Callable[[str, bytearray], None]] = {}

    def begin(self, router: str, watcher: Callable[[str, bytearray], None]) -> bytearray:
        """The journal of a router that starts. Its `watcher` is called with each other router that ends."""
        self._watchers[router] = watcher
        self._buffers[router] = bytearray(SIZE)
        return self._buffers[router]

    def end(self, router: str) -> None:
        """A router has ended, in whichever way."""
        del self._watchers[router]
        self._ended.append(router)
        for watcher in list(self._watchers.values()):
            watcher(router, self._buffers[router])

    def others(self, router: str) -> Iterator[tuple[str, bytearray]]:
        """The journals of all other routers, ended ones included."""
        return ((name, buffer) for name, buffer in self._buffers.items() if name != router)

    @property
    def left(self) -> list[tuple[str, bytearray]]:
        """The journals of routers that have ended."""
        return [(router, self._buffers[router]) for router in self._ended]
