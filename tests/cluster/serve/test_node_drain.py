import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cluster.serve.node_drain import NodeDrain, _end, members_here
from holdfast.worker.replica.processes import ProcessId

ROUTER, REPLICA = ProcessId(1, 10), ProcessId(2, 20)


class Node:
    """A node in virtual time. `ends_at` are the seconds at which its processes end by themselves."""

    def __init__(self, ends_at, *, is_head=False, error=None, others=0):
        self.now_s = 0.0
        self.ends_at, self.told, self.notices = dict(ends_at), {}, []
        self._is_head, self._error, self._others_until_s = is_head, error, others

    def announce(self, notice_s):
        self.notices.append(notice_s)
        if self._error:
            raise self._error
        return self._is_head

    def members(self):
        return [process for process, end_s in self.ends_at.items() if self.now_s < end_s]

    def end(self, process):
        """It takes five more seconds."""
        self.told[process] = self.now_s
        self.ends_at[process] = min(self.ends_at[process], self.now_s + 5)

    def sleep(self, seconds):
        self.now_s += seconds

    def run(self, notice_s=30.0, limit_s=60.0):
        drain = NodeDrain(
            announce=self.announce,
            num_other_nodes=lambda: int(self.now_s < self._others_until_s),
            members=self.members,
            end=self.end,
            now_s=lambda: self.now_s,
            sleep=self.sleep,
        )
        return drain.run(notice_s, limit_s)


def test_what_serve_ends_in_time_is_left_alone():
    node = Node({ROUTER: 3, REPLICA: 12})
    assert node.run()
    assert (node.told, node.notices) == ({}, [30.0])
    assert node.now_s == pytest.approx(12, abs=0.5)


def test_what_serve_leaves_is_told_to_end():
    node = Node({ROUTER: 3, REPLICA: 1000})
    assert node.run()
    assert list(node.told) == [REPLICA]
    assert node.now_s == pytest.approx(35, abs=0.5)


def test_without_ray_the_processes_are_told_at_once():
    node = Node({ROUTER: 1000, REPLICA: 1000}, error=ConnectionError("no head"))
    assert node.run()
    assert set(node.told.values()) == {0.0}
    assert node.now_s == pytest.approx(5, abs=0.5)


def test_a_drain_takes_no_longer_than_its_limit():
    node = Node({REPLICA: 1000})
    assert not node.run(notice_s=30, limit_s=32)
    assert node.now_s == pytest.approx(32, abs=0.5)


def test_the_head_waits_for_the_others():
    node = Node({}, is_head=True, others=40)
    assert node.run()
    assert node.now_s == pytest.approx(40, abs=0.5)


def test_members_are_found_by_their_titles(tmp_path: Path):
    me = ProcessId.of(1)
    titles = ("ray::ServeReplica:holdfast:Router", "ray::ServeReplica:holdfast:Replica:chat", "ray::RankActor", "bash")
    for title, pid in zip(titles, ("1", "1", "1", "1"), strict=True):
        path = tmp_path / f"{title.replace(':', '_')}" / pid
        path.mkdir(parents=True)
        (path / "cmdline").write_bytes(title.encode() + b"\0")
    found = [members_here(path) for path in sorted(tmp_path.iterdir())]
    assert sorted(map(len, found)) == [0, 0, 1, 1]
    assert [me] in found


def test_a_process_is_told_by_sigterm_and_one_that_is_gone_is_no_error():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as program:
        process = ProcessId.of(program.pid)
        _end(process)
        assert program.wait(30) == -15
    _end(process)
