"""The watch over child processes: what it says, and that it leaves nothing open."""

import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.worker.replica import rank
from holdfast.worker.replica.rank import LocalRanks
from tests.counting import collector_at_rest


def start_ranks() -> LocalRanks:
    """Three processes that end when their standard input does."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    return LocalRanks({rank: subprocess.Popen(command, stdin=subprocess.PIPE) for rank in (1, 2, 3)})


def pipes_and_watches() -> Counter[str]:
    """Of this process, by what the system calls them: each pipe has a number of its own."""
    names: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names[os.readlink(descriptor)] += 1
    return Counter({name: count for name, count in names.items() if "pipe:" in name or "pidfd" in name})


def test_starting_and_killing_ranks_leaves_no_file_open():
    """What others of this process close meanwhile is no matter: it counts what has come."""
    with collector_at_rest():
        before = pipes_and_watches()
        for _ in range(3):
            ranks = start_ranks()
            assert (pipes_and_watches() - before).total() >= 6, "a watch and a pipe for each"
            ranks.kill()
            ranks.wait()
            assert not pipes_and_watches() - before


def test_the_first_that_ends_is_named_to_everyone_who_waits():
    ranks = start_ranks()
    os.kill(ranks.pids[1], 9)
    assert [ranks.wait(), ranks.wait()] == ["rank 2 ended with code -9"] * 2
    ranks.kill()
    ranks.kill()
    assert ranks.wait() == "rank 2 ended with code -9"


def test_many_open_files_do_not_blind_the_watch():
    """`select` refuses descriptors from 1024 on."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine allows fewer files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    occupied = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        ranks = start_ranks()
        ranks.kill()
        assert "ended with code -9" in ranks.wait()
    finally:
        for descriptor in occupied:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_the_kernel_has_ended_for_want_of_memory_is_told_so(monkeypatch):
    kills = [4]
    monkeypatch.setattr(rank, "oom_kills", lambda: kills[0])
    ranks = start_ranks()
    kills[0] += 1
    os.kill(ranks.pids[1], 9)
    assert ranks.wait() == "rank 2 ended with code -9; the kernel has ended a process for want of memory"
    ranks.kill()
