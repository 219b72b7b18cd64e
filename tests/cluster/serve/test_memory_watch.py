"""A process that was ended for want of memory: someone else says so. Counts are injected, but for the system's."""

import os
import subprocess
import sys

import pytest

from holdfast.cluster.serve.node_watch import MemoryWatch
from holdfast.worker.process_memory import available_memory

HELD_BYTES = 2**30
STARVED = """
import ray
from holdfast.cluster.serve.node_watch import MemoryWatch
from holdfast.cluster.serve.ray_internals import ended_by_ray

ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
watch = MemoryWatch(print, by_ray=ended_by_ray)

@ray.remote(max_retries=0)
def hold(num_bytes):
    held = b"x" * num_bytes
    while True:
        pass

try:
    ray.get(hold.remote({held}))
except ray.exceptions.OutOfMemoryError:
    pass
watch.look()
"""


class Counts:
    def __init__(self) -> None:
        self.kernel, self.ray = 3, 0
        self.said: list[str] = []

    def watch(self) -> MemoryWatch:
        return MemoryWatch(self.said.append, lambda: self.kernel, lambda: self.ray)


def test_what_ended_before_is_not_ours_and_each_end_is_told_once():
    counts = Counts()
    watch = counts.watch()
    watch.look()
    assert not counts.said
    counts.kernel += 1
    watch.look()
    watch.look()
    (said,) = counts.said
    assert said.startswith("out of memory: the kernel has ended a process on this machine")
    assert "lower --replicas" in said
    counts.ray += 5
    watch.look()
    assert "Ray's memory monitor has ended 5 processes" in counts.said[-1]


def test_a_count_that_cannot_be_read_for_a_while_is_not_taken_for_more():
    counts = Counts()
    watch = counts.watch()
    counts.kernel = 0
    watch.look()
    counts.kernel = 3
    watch.look()
    assert not counts.said


@pytest.mark.slow
@pytest.mark.cluster
def test_ray_tells_how_many_it_has_ended():
    """Its memory monitor has a limit here that a task with a GiB goes over."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (total - available_memory() + HELD_BYTES * 3 // 4) / total
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), RAY_memory_usage_threshold=f"{limit:.4f}")
    program = STARVED.replace("{held}", str(HELD_BYTES))
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert "out of memory: Ray's memory monitor has ended" in done.stdout, done.stderr
