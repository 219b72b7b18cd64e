"""Memory that the machine, or the container around this process, can still give, and what ended for want of it.

It needs no torch. What may not live here: who gets how much of it (`worker/model/memory.py`).
"""

from pathlib import Path


def available_memory() -> int:
    """Bytes."""
    meminfo = Path("/proc/meminfo").read_text().split()
    available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory: in this container, or else on this machine."""
    in_container = Path("/sys/fs/cgroup/memory.events")
    words = (in_container if in_container.is_file() else Path("/proc/vmstat")).read_text().split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def readable_bytes(num_bytes: float) -> str:
    """For people: `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(units) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.4g} {units[unit]}"
