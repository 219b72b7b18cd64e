"""Available memory of the machine or of the container around this process, and processes that the kernel's OOM killer
ended.

A container is a control group (cgroup v2, or the memory controller of v1); each group around this process bounds it. It
needs no torch.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

NO_LIMIT: Final = 2**60
"""cgroup v1 writes about 2**63 where there is no limit."""

_MOUNTED: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Files of one group, by the names that its version of the interface has."""

    folder: Path
    limit: str
    usage: str
    cache: str
    """The key of `memory.stat` that counts pages of files which the kernel drops before it ends a process."""
    events: str

    @property
    def limit_bytes(self) -> int | None:
        """None: it has none."""
        text = _read(self.folder / self.limit)
        return int(text) if text.isdecimal() and int(text) < NO_LIMIT else None

    @property
    def used_bytes(self) -> int:
        """Bytes in use without what the kernel can drop at once."""
        return int(_read(self.folder / self.usage) or 0) - _counts(self.folder / "memory.stat").get(self.cache, 0)

    @property
    def num_oom_kills(self) -> int | None:
        """None where the kernel does not count them."""
        return _counts(self.folder / self.events).get("oom_kill")


def control_groups(mounted: Path = _MOUNTED, own: Path = _OWN) -> Iterator[ControlGroup]:
    """The groups that bound this process's memory, from its own outwards. Where a container shows its own group alone
    as the root, this is the only one.
    """
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and (mounted / "cgroup.controllers").is_file():
            root, names = mounted, ("memory.max", "memory.current", "inactive_file", "memory.events")
        elif "memory" in controllers.split(","):
            root = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if (folder / names[1]).is_file():
                yield ControlGroup(folder, *names)
            if folder == root:
                break


def total_memory() -> int:
    """Bytes that this process and those beside it in its container may use together, at most."""
    limits = (group.limit_bytes for group in control_groups())
    return min(_meminfo("MemTotal"), *(limit for limit in limits if limit is not None), NO_LIMIT)


def available_memory() -> int:
    """Bytes."""
    available = _meminfo("MemAvailable")
    for group in control_groups():
        if (limit := group.limit_bytes) is not None:
            available = min(available, limit - group.used_bytes)
    return max(available, 0)


def oom_kills() -> int:
    """Processes that the kernel has ended for lack of memory: in this container, or else on this machine."""
    counted = (group.num_oom_kills for group in control_groups())
    inner = next((count for count in counted if count is not None), None)
    return _counts(Path("/proc/vmstat")).get("oom_kill", 0) if inner is None else inner


def readable_bytes(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(units) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.4g} {units[unit]}"


def _meminfo(name: str) -> int:
    words = Path("/proc/meminfo").read_text().split()
    return int(words[words.index(f"{name}:") + 1]) * 1024


def _counts(path: Path) -> Mapping[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in _read(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _read(path: Path) -> str:
    """Empty for a file that is not there: groups come and go, and not every kernel has all of them."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def give_back() -> None:
    """Takes milliseconds, without Python's lock. Does nothing where the C library is not glibc."""
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return lambda _: 0
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim  # type: ignore[no-any-return]


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside it nothing is collected. Objects made by an import stay, and scanning them again and again takes a fifth
    of the CPU time of an import of torch; collections among the values of a large body hold Python's lock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Inside it nothing is collected. Objects that exist at its end count as old: otherwise the next collection of the
    young generation would scan each object of an import once more in vain.
    """
    with uncollected():
        yield
        if not gc.get_freeze_count():  # what somebody has set aside stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation


@contextmanager
def loading() -> Iterator[None]:
    """Inside it nothing is collected. Objects that exist at its end are set aside, except garbage, which is freed."""
    with uncollected():
        yield
        gc.collect()
        set_aside()


def set_aside() -> None:
    """No collection looks at the present objects again. Those in no cycle are freed as ever."""
    gc.freeze()


def take_back() -> None:
    """Collections look at all objects again."""
    gc.unfreeze()
