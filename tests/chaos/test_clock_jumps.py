"""A cluster whose wall clock jumps by a day under load, both ways: no stream is lost, and what dies is replaced.

libfaketime stands between its processes and the system's clock; the machine's own clock stays as it is.
"""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import loops
from tests.chaos.command import Served, served
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row, Tally

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(500)]

LIBRARIES = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))
DAY_S = 24 * 3600
NUM_CLIENTS = 4
MAX_TOKENS = 60
SEEN_S = 1
"""So often the library looks at its file."""

AFTER_S = 6.0
BACK_S = 120.0
LIMIT_S = 450
POLL_S = 0.1


class WallClock:
    """The wall clock of the processes that start under it; their monotonic clock is the system's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set_off(0)

    def set_off(self, seconds: int) -> None:
        """From the system's."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}s\n")
        new.replace(self._file)

    @property
    def environ(self) -> dict[str, str]:
        given = {"LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME_TIMESTAMP_FILE": str(self._file)}
        return {**given, "DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": str(SEEN_S), "FAKETIME_DONT_RESET": "1"}


async def jump(clock: WallClock, to_s: int, load: Load, row: Row) -> None:
    await load.under_way(NUM_CLIENTS // 2)
    struck_s = time.monotonic()
    clock.set_off(to_s)
    row.num_faults += 1
    row.pauses_s += await load.settle(struck_s)
    while time.monotonic() < struck_s + AFTER_S:
        await load.judge_all(row)


async def lose_a_replica(cluster: Served, load: Load, row: Row) -> None:
    """Serve's controller replaces it, by whatever clock."""
    (before, *_) = replicas = cluster.named(":Replica")
    await load.under_way(NUM_CLIENTS // 2)
    os.kill(before.pid, signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        while len(set(cluster.named(":Replica")) - {before}) < len(replicas):
            await asyncio.sleep(POLL_S)
    await load.judge_all(row)


async def jumps(cluster: Served, clock: WallClock, offsets_s: Sequence[int], tally: Tally) -> None:
    kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    async with steady_load(cluster.routers, kinds, NUM_CLIENTS) as load:
        await load.judge_all(Row())
        for offset_s in offsets_s:
            row = tally.row(f"the wall clock jumps to {offset_s / 3600:+.0f} h")
            await jump(clock, offset_s, load, row)
            await lose_a_replica(cluster, load, row)
            assert row.num_streams > 0
            assert row.is_clean, row.differences


@pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not here (apt-get install faketime)")
def test_streams_go_on_when_the_wall_clock_jumps(tmp_path, tally):
    clock = WallClock(tmp_path / "offset")
    with served("--replicas", "2", environ=clock.environ) as cluster:
        loops.run(jumps(cluster, clock, (DAY_S, -DAY_S, 0), tally), timeout_s=LIMIT_S)
