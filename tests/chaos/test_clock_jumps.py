"""The wall clock jumps by an hour, both ways, and by ten years, under load: nothing is lost, early, late or refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import loops
from tests.chaos import clock_jumps
from tests.chaos.command import Served, served
from tests.chaos.forked import POLL_S
from tests.chaos.jumping_clock import COMPILER, HOUR_S, YEAR_S, JumpingClock, built
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row, Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(clock_jumps.LIMIT_S + 60),
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs gcc and glibc"),
]


def test_streams_keys_rates_and_deadlines_survive_a_wall_clock_that_jumps(tmp_path, tally):
    """Routers, replicas and clients in real processes, without Ray: all of them jump at once."""
    environ = JumpingClock(tmp_path / "offset").environ(built(tmp_path))
    command = [sys.executable, "-m", "tests.chaos.clock_jumps", str(tmp_path)]
    ended = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-6000:]
    rows = json.loads(ended.stdout.splitlines()[-1])
    assert rows.keys() == clock_jumps.OFFSETS_S.keys()
    for name, fields in rows.items():
        row = Row(**fields)
        tally.add(f"the wall clock jumps: {name}", row)
        assert row.num_streams >= clock_jumps.NUM_CLIENTS
        assert row.is_clean, (name, row.differences)


# --- under Ray ---

BACK_S = 120.0
"""In which Serve has replaced a replica."""


async def lose_a_replica(cluster: Served, load: Load, row: Row) -> None:
    (lost, *_) = replicas = cluster.named(":Replica")
    await load.under_way(clock_jumps.NUM_CLIENTS // 2)
    os.kill(lost.pid, signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        while len(set(cluster.named(":Replica")) - {lost}) < len(replicas):
            await asyncio.sleep(POLL_S)
    await load.judge_all(row)


async def jumps_of_a_cluster(cluster: Served, clock: JumpingClock, tally: Tally) -> None:
    kinds = [kind.longer(clock_jumps.MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    async with steady_load(cluster.routers, kinds, clock_jumps.NUM_CLIENTS) as load:
        await load.judge_all(Row())
        for offset_s, replaces in ((HOUR_S, True), (10 * YEAR_S, True), (0.0, False)):
            row = tally.row(f"the wall clock of a cluster jumps to {offset_s / HOUR_S:+.0f} h")
            row.num_faults = 1
            await load.under_way(clock_jumps.NUM_CLIENTS // 2)
            struck_s = time.monotonic()
            clock.jump(offset_s)
            row.pauses_s += await load.settle(struck_s)
            if replaces:
                await lose_a_replica(cluster, load, row)
            await load.judge_all(row)
            assert row.num_streams > 0
            assert row.is_clean, row.differences


@pytest.mark.cluster
def test_a_cluster_replaces_what_dies_after_its_wall_clock_has_jumped_ahead(tmp_path, tally):
    """All processes of `holdfast serve`. After a step back Ray replaces nothing, and streams go on."""
    clock = JumpingClock(tmp_path / "offset")
    with served("--replicas", "2", environ=clock.environ(built(tmp_path))) as cluster:
        loops.run(jumps_of_a_cluster(cluster, clock, tally), timeout_s=clock_jumps.LIMIT_S)
