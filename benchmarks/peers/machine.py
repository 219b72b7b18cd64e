"""Noise watch: what a machine's cores and memory were used for, read from /proc."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc")
_REPOSITORY: Final = Path(__file__).parents[2]
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Who used the cores over a stretch of time, as shares of all cores."""

    ours: float
    """The process group that was watched, and the process that watched it, with its children that ended meanwhile."""
    others: float
    """Everyone else, and what the hypervisor took."""


class NoiseWatch:
    """From its making until `usage()`: what the process group used, and what others did meanwhile."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._started = self._now()

    def usage(self) -> Usage:
        (then_s, busy, mine), (now_s, busy_now, mine_now) = self._started, self._now()
        all_ticks = max(now_s - then_s, 1e-9) * _TICKS_PER_S * num_cpus()
        ours, total = mine_now - mine, busy_now - busy
        return Usage(ours=ours / all_ticks, others=max(0.0, (total - ours) / all_ticks))

    def _now(self) -> tuple[float, float, float]:
        own = os.times()
        mine = sum(own[:4]) * _TICKS_PER_S + sum(_ticks(stat) for stat in _group_stats(self._group))
        return time.perf_counter(), _busy_ticks(), mine


def settle(quiet: float, limit_s: float, pause_s: float = 0.5) -> bool:
    """Waits until others use less than `quiet` of the machine for a moment, or the time is up."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        watch = NoiseWatch(os.getpgrp())
        time.sleep(pause_s)
        if watch.usage().others < quiet:
            return True
    return False


def peak_memory_mib(group: int) -> int:
    """The sum of the highest resident sizes in a process group. What its processes share is counted in each."""
    total_kib = 0
    for pid, _ in _group_members(group):
        fields = _fields(_PROC / str(pid) / "status")
        total_kib += int(fields.get("VmHWM", "0 kB").split()[0])
    return total_kib // 1024


def available_memory_mib() -> int:
    return int(_fields(_PROC / "meminfo")["MemAvailable"].split()[0]) // 1024


def num_cpus() -> int:
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """What a figure depends on."""
    cpu = _fields(_PROC / "cpuinfo")
    flags = set(cpu.get("flags", "").split())
    kinds = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "cores": num_cpus(),
        "instructions": [kind for kind in kinds if kind in flags],
        "memory_gib": round(int(_fields(_PROC / "meminfo")["MemTotal"].split()[0]) / 1024**2, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of this checkout, with `-dirty` if files have changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY, check=False)
    return ended.stdout.strip()


def _busy_ticks() -> float:
    user, nice, system, _, _, irq, softirq, steal = map(int, (_PROC / "stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq + steal


def _group_members(group: int) -> Iterator[tuple[int, list[str]]]:
    """Each process of the group, with the fields of its `stat` after the name."""
    for path in _PROC.iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[2]) == group:
                yield int(path.name), fields


def _group_stats(group: int) -> Iterator[list[str]]:
    return (fields for _, fields in _group_members(group))


def _ticks(stat: list[str]) -> int:
    """User and system time: of the process and of its children that have ended."""
    return sum(map(int, stat[11:15]))


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines; the first of each name. Empty if the process has ended."""
    found: dict[str, str] = {}
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return found
