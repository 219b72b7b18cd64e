"""Memory that the machine, or the container around this process, can still give. It needs no torch.

What may not live here: who gets how much of it (`worker/model/memory.py`).
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


def readable_bytes(num_bytes: float) -> str:
    """For people: `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(units) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.4g} {units[unit]}"
