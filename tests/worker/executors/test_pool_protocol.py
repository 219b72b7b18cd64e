"""The thread pool's protocol under every order of its atomic operations, and with bugs planted that must be found."""

import subprocess
from pathlib import Path

import pytest

from tests.worker.executors.native_build import NATIVE, compiled

FLAGS = ("-O2", "-U_FORTIFY_SOURCE")  # which takes the checker's jumps between stacks for an error
LONG = (pytest.mark.slow, pytest.mark.timeout(1800))  # up to a minute of computing
ORDERS = [  # preemptions, threads, jobs, then the tasks of each phase
    (2, 2, 2, 2, 1),
    (2, 2, 2, 1, 3),
    (1, 3, 2, 2, 1),
    pytest.param((2, 2, 3, 1, 0, 2), marks=LONG),
    pytest.param((3, 2, 2, 2, 1), marks=LONG),
    pytest.param((2, 3, 2, 1, 2), marks=LONG),
]
CLAIM = "      if (!run.slot->progress.compare_exchange_weak(word, after)) continue;\n"
RING = "      if (finished && done_of(after) == n) run.pool->advanced.ring();\n"
PLANTED = {  # what the protocol says, and what a mistake would say
    "wakes before the phase has ended": (CLAIM + RING, RING + CLAIM),
    "wakes nobody at the end of a phase": (RING, ""),
    "wakes before the job is there": (
        "    current.store((++serial << 16) + Word(index));\n    started.ring();\n",
        "    started.ring();\n    current.store((++serial << 16) + Word(index));\n",
    ),
    "sleeps without a second look": ("if (!over()) Atomics::sleep_while", "Atomics::sleep_while"),
    "listens for the bell too late": (
        "if (!over()) Atomics::sleep_while(rung, heard);",
        "if (!over()) heard = rung.load(), Atomics::sleep_while(rung, heard);",
    ),
    "counts itself as asleep too late": (
        "        sleepers.fetch_add(1);\n        std::uint32_t heard = rung.load();\n        if (!over()) Atomics",
        "        std::uint32_t heard = rung.load();\n        bool early = over();\n        sleepers.fetch_add(1);\n"
        "        if (!early) Atomics",
    ),
    "enters without a second look": ("if (current.load() == seen) {", "{"),
    "enters before it says so": (
        "    slot.readers.fetch_add(1);\n    if (current.load() == seen) {",
        "    bool same = current.load() == seen;\n    slot.readers.fetch_add(1);\n    if (same) {",
    ),
    "takes a slot that is read": (
        "if (i != taken && slots[i].readers.load() == 0) return i;",
        "if (i != taken) return i;",
    ),
    "takes the slot of the last job": ("if (i != taken && slots", "if (slots"),
    "leaves a job open": ("run.slot->progress.exchange(kClosed);", "run.slot->progress.load();"),
    "does not wait for a phase": ("if (n > 0) run.pool->advanced.wait(*run.waiter, over);", ""),
    "claims in another phase": ("if (phase_of(word) > run.phase) return kNone;", ""),
    "tells nobody that it left": ("    left.ring();\n", ""),
    "drains without waiting": ("slots[i].readers.load() == 0; });", "true; });"),
}
ALWAYS = ("sleeps without a second look", "takes a slot that is read")  # the others are for the long run


def check(program: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, numbers)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("checker") / "checker.o", "checker.cpp", *FLAGS)


@pytest.fixture(scope="module")
def program(checker):
    return compiled(checker.with_name("check_pool"), "check_pool.cpp", checker, *FLAGS)


@pytest.mark.parametrize("numbers", ORDERS, ids=lambda numbers: "-".join(map(str, numbers)))
def test_no_order_of_operations_breaks_the_protocol(program, numbers):
    result = check(program, *numbers)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no fault in" in result.stdout


@pytest.mark.parametrize("bug", [bug if bug in ALWAYS else pytest.param(bug, marks=LONG) for bug in PLANTED])
def test_a_planted_bug_is_found(checker, tmp_path, bug):
    right, wrong = PLANTED[bug]
    source = (NATIVE / "pool_protocol.h").read_text()
    assert source.count(right) == 1, "the protocol no longer has the line in which the bug is planted"
    (tmp_path / "pool_protocol.h").write_text(source.replace(right, wrong))
    program = compiled(tmp_path / "check_pool", "check_pool.cpp", checker, "-w", *FLAGS, headers=(tmp_path,))
    result = check(program, 2, 2, 2, 2, 1)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.startswith("FAILED: ")
