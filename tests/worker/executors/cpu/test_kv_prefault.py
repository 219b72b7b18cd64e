"""Pages get their memory between steps: which ones, when, and without a byte changed."""

import mmap
import queue
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.worker.executors.cpu.prefault import AHEAD_BYTES, LARGE_PAGE, KvPrefault, Pages, populate
from holdfast.worker.executors.cpu.tile_memory import address_of, mapped_memory

BLOCK_BYTES = LARGE_PAGE // 4


class Kernel:
    """Stands for the system: notes what is asked for, and answers as it is told."""

    def __init__(self, answer: bool = True) -> None:
        self.asked: queue.Queue[tuple[int, int]] = queue.Queue()
        self.answer = answer

    def populate(self, pages: Pages, begin: int, end: int) -> bool:
        self.asked.put((begin // pages.block_bytes, end // pages.block_bytes))
        return self.answer

    def next(self) -> tuple[int, int]:
        return self.asked.get(timeout=30)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ahead(kernel: Kernel, clock: Clock) -> Iterator[KvPrefault]:
    layers = [Pages(mapped_memory(0), 64, BLOCK_BYTES) for _ in range(2)]
    ahead = KvPrefault(layers, populate=kernel.populate, clock=clock)
    yield ahead
    ahead.close()


def test_layers_take_turns_until_enough_blocks_are_ready(kernel: Kernel, ahead: KvPrefault, clock: Clock) -> None:
    clock.now += 1
    runs = AHEAD_BYTES // LARGE_PAGE
    expected = [(4 * run, 4 * run + 4) for run in range(runs) for _ in range(2)]
    assert [kernel.next() for _ in range(2 * runs)] == expected

    ahead.begin_step()
    ahead.end_step(last_block=2)  # three more blocks are wanted: a page of each layer has them
    clock.now += 1
    assert [kernel.next() for _ in range(2)] == [(4 * runs, 4 * runs + 4)] * 2
    assert kernel.asked.empty()


def test_while_steps_run_only_the_next_page_is_asked_for(kernel: Kernel, ahead: KvPrefault, clock: Clock) -> None:
    ahead.begin_step()
    clock.now += 1
    assert [kernel.next() for _ in range(2)] == [(0, 4)] * 2
    with pytest.raises(queue.Empty):
        kernel.asked.get(timeout=0.1)
    ahead.end_step(last_block=0)  # a step has just run
    assert [kernel.next() for _ in range(2)] == [(4, 8)] * 2
    with pytest.raises(queue.Empty):
        kernel.asked.get(timeout=0.1)
    clock.now += 1
    assert kernel.next() == (8, 12)


def test_blocks_that_are_used_without_a_step_count(kernel: Kernel, ahead: KvPrefault, clock: Clock) -> None:
    ahead.begin_step()
    assert [kernel.next() for _ in range(2)] == [(0, 4)] * 2
    ahead.note_use(last_block=3)
    assert [kernel.next() for _ in range(2)] == [(4, 8)] * 2
    with pytest.raises(queue.Empty):
        kernel.asked.get(timeout=0.1)


def test_the_last_blocks_are_the_end(kernel: Kernel, ahead: KvPrefault, clock: Clock) -> None:
    ahead.end_step(last_block=63)
    clock.now += 1
    asked = [kernel.next() for _ in range(2 * 64 // 4)]
    assert asked[-1] == (60, 64)


def test_all_that_is_wanted_comes_while_no_step_runs(kernel: Kernel, ahead: KvPrefault, clock: Clock) -> None:
    ahead.begin_step()
    ahead.want_all()
    clock.now += 1
    assert [kernel.next() for _ in range(2)] == [(0, 4)] * 2  # the next page, as ever
    with pytest.raises(queue.Empty):
        kernel.asked.get(timeout=0.1)
    ahead.end_step(last_block=0)
    clock.now += 1
    asked = [kernel.next() for _ in range(2 * (64 // 4 - 1))]
    assert asked == [(begin, begin + 4) for begin in range(4, 64, 4) for _ in range(2)]


def test_a_system_that_cannot_is_asked_once(clock: Clock) -> None:
    kernel = Kernel(answer=False)
    ahead = KvPrefault([Pages(mapped_memory(0), 64, BLOCK_BYTES)], populate=kernel.populate, clock=clock)
    clock.now += 1
    kernel.next()
    ahead.end_step(last_block=40)
    clock.now += 1
    with pytest.raises(queue.Empty):
        kernel.asked.get(timeout=0.1)


def test_populated_memory_is_there_and_unchanged() -> None:
    memory = mapped_memory(4 * LARGE_PAGE)
    memory[5] = 7
    pages = Pages(memory, num_blocks=8, block_bytes=LARGE_PAGE // 2)
    if not populate(pages, 0, 2 * LARGE_PAGE):
        pytest.skip("this kernel cannot back memory ahead (before Linux 5.14)")
    assert resident_bytes(memory) >= 2 * LARGE_PAGE
    assert memory[5] == 7
    assert not any(memory[6 : 2 * LARGE_PAGE])


def resident_bytes(memory: mmap.mmap) -> int:
    """Of the mapping that holds this memory, by the system's own count."""
    address = address_of(memory)
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        first, end = (int(text, 16) for text in part.split(" ", 1)[0].split("-"))
        if first <= address < end:
            found = re.search(r"^Rss: *(\d+) kB", part, flags=re.MULTILINE)
            return int(found[1]) * 1024 if found else 0
    return 0


def test_memory_that_is_given_back_holds_zeros_and_its_neighbours_stay_as_they_are():
    pages = Pages.mapped(8, 16384)
    rows = np.frombuffer(pages.memory, np.uint8, 8 * 16384).reshape(8, 16384)
    rows[:] = 7
    pages.give_back(np.array([0, 1, 2, 5]))
    whole = [bool((row == 7).all()) for row in rows]
    assert [whole[number] for number in (3, 4, 6, 7)] == [True] * 4
    assert not rows[[1, 5], 4096:-4096].any()
