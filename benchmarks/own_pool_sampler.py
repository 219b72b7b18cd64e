"""Native sampler with a thread pool of its own, for what draws without an executor."""

from contextlib import suppress
from typing import Self

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.sampler import NativeSampler


class OwnPoolSampler(NativeSampler):
    """Made by `with_threads`; its pool ends with it."""

    own_pool: int | None = None

    @classmethod
    def with_threads(cls, num_threads: int, instruction_class: str | None = None) -> Self:
        """Raises `Unavailable` where this machine cannot run it."""
        library = load_library(instruction_class)
        pool = library.native_pool_create(num_threads, -1, None)
        if not pool:
            raise ReplicaError(f"{num_threads} threads could not be started")
        try:
            sampler = cls(library, pool)
        except ReplicaError:
            library.native_pool_destroy(pool)
            raise
        sampler.own_pool = pool
        return sampler

    def close(self) -> None:
        super().close()
        if self.own_pool is not None:
            self._library.native_pool_destroy(self.own_pool)
            self.own_pool = None

    def __del__(self) -> None:
        if self.own_pool is not None:
            with suppress(ReplicaError):
                self.close()
