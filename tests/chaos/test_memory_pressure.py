"""A cluster in a control group whose memory runs out under load: the kernel ends its processes, and streams go on."""

import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from tests import loops
from tests.chaos.command import Served, served
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row, Tally

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(450)]

CONTROLLER = Path("/sys/fs/cgroup/memory")
MB = 2**20
SPARE_BYTES = 150 * MB
"""What the group has beyond what the cluster holds when it is up."""

NUM_CLIENTS = 4
MAX_TOKENS = 60
SHORT_S = 15.0
BACK_S = 90.0
RETURN_S = 240.0
"""Ray misses a worker that is ended while it starts only when its 60 s to register are over; it may happen thrice."""
LIMIT_S = 350
POLL_S = 0.1


class Group:
    """A memory control group of version 1, made for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._members = folder / "cgroup.procs"

    def enter(self) -> None:
        """The process that calls this belongs to the group from here on."""
        self._members.write_text(str(os.getpid()))

    @property
    def entered(self) -> list[str]:
        """Runs the command behind it in the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._members)]

    @property
    def held(self) -> int:
        """What its processes hold, without pages of files, which the kernel drops before it ends a process."""
        words = (self._folder / "memory.stat").read_text().split()
        counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return counts["total_rss"] + counts["total_shmem"]

    def limit(self, num_bytes: int) -> None:
        (self._folder / "memory.limit_in_bytes").write_text(str(num_bytes))

    @property
    def num_kills(self) -> int:
        words = (self._folder / "memory.oom_control").read_text().split()
        return int(words[words.index("oom_kill") + 1])


@pytest.fixture
def group() -> Iterator[Group]:
    folder = CONTROLLER / f"holdfast-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group (v1) can be made here: {error}")
    try:
        yield Group(folder)
    finally:
        end_s = time.monotonic() + BACK_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < end_s:
            time.sleep(POLL_S)
        folder.rmdir()


def hold(group: Group, num_bytes: int) -> None:
    """A neighbour in the same group that takes memory."""
    group.enter()
    pages = mmap.mmap(-1, num_bytes)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        pages[at] = 1
    time.sleep(LIMIT_S)


@contextmanager
def neighbour(group: Group, num_bytes: int) -> Iterator[None]:
    process = get_context("spawn").Process(target=hold, args=(group, num_bytes))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def starve(cluster: Served, group: Group, load: Load, tally: Tally) -> None:
    """Three times the spare memory is taken for a while: somebody has to go. A stream whose replicas have all gone
    waits until memory is free again.
    """
    await load.judge_all(Row())
    row = tally.row("memory of the container runs out")
    struck = await load.under_way(NUM_CLIENTS // 2)
    group.limit(group.held + SPARE_BYTES)
    struck_s = time.monotonic()
    with neighbour(group, 3 * SPARE_BYTES):
        async with asyncio.timeout(BACK_S):
            while not group.num_kills:
                await asyncio.sleep(POLL_S)
        row.num_faults += 1
        while time.monotonic() < struck_s + SHORT_S:
            await asyncio.sleep(POLL_S)
    row.pauses_s += await load.settle(struck_s, struck)
    print(f"the kernel has ended {group.num_kills} processes")
    await load.judge_all(row)
    assert row.num_streams > 0
    assert row.is_clean, row.differences
    async with asyncio.timeout(RETURN_S):
        while len(cluster.named(":Replica")) < 2 or len(cluster.named(":Router")) < 2:
            await asyncio.sleep(POLL_S)


def test_streams_go_on_when_the_container_has_no_memory_left(group, tally):
    async def run(cluster: Served) -> None:
        kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
        async with steady_load(cluster.routers, kinds, NUM_CLIENTS) as load:
            await starve(cluster, group, load, tally)

    flags = ("--replicas", "2", "--kv-cache-memory", "64MiB")
    with served(*flags, before=group.entered) as cluster:
        assert psutil.pid_exists(cluster.process.pid)
        loops.run(run(cluster), timeout_s=LIMIT_S)
