"""Planted mistakes with adapters, by name: each is made in the processes of one cluster, after they were forked."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.worker.adapter import Adapter
from holdfast.worker.block_hash import HashChain
from holdfast.worker.engine.adapters import RankAdapters
from holdfast.worker.executors.cpu.adapters import PackedAdapter
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.step_plan import DecodeColumns


def wrong_scale() -> None:
    """An adapter's scales change after it was proved."""
    put = CpuExecutor.put_adapter

    def planted(self: CpuExecutor, slot: int, adapter: PackedAdapter | None) -> None:
        if adapter is not None:
            adapter.scales *= 1.5
        put(self, slot, adapter)

    CpuExecutor.put_adapter = planted  # type: ignore[method-assign]


def neighbours_row() -> None:
    """In a step that decodes, each row has the adapter of the next one."""
    make = DecodeColumns.__init__

    def planted(self: DecodeColumns, *arguments: Any, **options: Any) -> None:
        *others, slots = arguments
        make(self, *others, [*slots[1:], *slots[:1]], **options)

    DecodeColumns.__init__ = planted  # type: ignore[method-assign]


def stale_version() -> None:
    """A replica loads what the folder holds, whichever content the request is bound to."""
    load = RankAdapters.load

    def planted(self: RankAdapters, adapter: Adapter) -> PackedAdapter:
        return load(self, Adapter.in_folder(adapter.name, adapter.path))

    RankAdapters.load = planted  # type: ignore[method-assign]


def shared_cache() -> None:
    """Blocks of one adapter are found for another."""
    make = HashChain.__init__

    def planted(self: HashChain, salt: str, tenant: str = "", adapter: str = "") -> None:
        make(self, salt, tenant)

    HashChain.__init__ = planted  # type: ignore[method-assign]


PLANTED: Final[Mapping[str, Callable[[], None]]] = {
    one.__name__: one for one in (wrong_scale, neighbours_row, stale_version, shared_cache)
}
