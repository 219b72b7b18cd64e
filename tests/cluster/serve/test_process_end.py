"""Processes that end by themselves. Real ones: the end of this one would be the end of the tests."""

import errno
import subprocess
import sys

import pytest

from holdfast.cluster.serve.member_process import EXIT_CODE, is_out_of_memory

PREPARED = """
import logging, sys, threading
from holdfast.cluster.serve.member_process import ProcessEnd, end_when_out_of_memory
from holdfast.worker.errors import ReplicaError
"""


def outcome(program: str) -> subprocess.CompletedProcess[str]:
    """Of a process that goes on after the program, if it can, and then says so."""
    program = f"{PREPARED}{program}\nprint('it goes on')"
    return subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )


SWALLOWED = """
end_when_out_of_memory()
try:
    raise {error}
except Exception:
    logging.getLogger("grpc.aio").{log}
"""


@pytest.mark.parametrize(
    "error", ["MemoryError()", 'RuntimeError("can\'t start new thread")', "OSError(12, 'no memory')"]
)
def test_an_error_of_memory_that_is_swallowed_ends_the_process(error):
    done = outcome(SWALLOWED.format(error=error, log="exception('a call failed')"))
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")
    assert "out of memory" in done.stderr


def test_other_errors_are_logged_as_ever():
    done = outcome(SWALLOWED.format(error="RuntimeError('a bug')", log="exception('a call failed')"))
    assert (done.returncode, done.stdout) == (0, "it goes on\n")
    assert "a call failed" in done.stderr
    assert "RuntimeError: a bug" in done.stderr


def test_a_thread_that_ends_of_it_ends_the_process():
    done = outcome("""
end_when_out_of_memory()
def run():
    raise MemoryError
thread = threading.Thread(target=run)
thread.start()
thread.join()
""")
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")


def test_a_log_that_cannot_be_written_does_not_keep_the_process():
    done = outcome("import os; os.close(2)\n" + SWALLOWED.format(error="MemoryError()", log="exception('x')"))
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")


FAILED = """
def last_words():
    print("last words", flush=True)
    {then}
end = ProcessEnd(last_words)
threading.Thread.start = None  # there is no memory for another one
end.because(ReplicaError("the replica failed"))
threading.Event().wait()
"""


@pytest.mark.parametrize("then", ["return", "raise MemoryError"])
def test_a_failed_replica_ends_its_process_without_a_new_thread(then):
    done = outcome(FAILED.format(then=then))
    assert (done.returncode, done.stdout) == (EXIT_CODE, "last words\n")
    assert "this process ends: the replica failed" in done.stderr


def test_what_is_no_want_of_memory_is_not_taken_for_it():
    assert not is_out_of_memory(OSError(errno.ENOSPC, "disk full"))
    assert not is_out_of_memory(RuntimeError("a bug"))
