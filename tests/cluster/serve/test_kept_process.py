"""The keeper of a GCS starts it again each time that it ends, and ends one that hangs."""

import errno
import os
import queue
import select
import signal
import subprocess
import sys
import threading

import pytest

from holdfast.cluster.serve import kept_process, reaper
from holdfast.cluster.serve.kept_process import SILENT_S, Silence, kept_gcs

LIMIT_S = 60


class FakeRay:
    """Its GCS is a process that waits. `started` gets each one, the first as well."""

    name, effect = "Ray's GCS", "streams continue"
    process: subprocess.Popen[bytes]

    def __init__(self) -> None:
        self.num_refused = 0
        self.started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self.start_again()

    def start_again(self) -> None:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError("no memory")
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        self.started.put(self.process)


@pytest.fixture
def ray():
    fake = FakeRay()
    yield fake
    fake.process.kill()
    fake.process.wait()


def test_a_gcs_that_ends_starts_again_as_often_as_it_ends(ray: FakeRay):
    said: list[str] = []
    with kept_gcs(ray, said.append, lambda: True):
        for number in range(4):
            ray.started.get(timeout=LIMIT_S).kill()
            assert len(said) >= number, "who has been started was asked for"
        ray.started.get(timeout=LIMIT_S)
    assert len(said) == 4
    assert all("Ray's GCS has ended (signal 9 after" in line for line in said)
    assert ray.process.poll() is None, "the keeper's end is not that of the GCS"


def test_a_start_that_fails_is_tried_again(ray: FakeRay):
    with kept_gcs(ray, lambda text: None, lambda: True):
        first = ray.started.get(timeout=LIMIT_S)
        ray.num_refused = 2
        first.kill()
        ray.started.get(timeout=LIMIT_S)
    assert ray.num_refused == 0


class TiedRay(FakeRay):
    """Its GCS ends with the thread that has started it, as a private Ray's does from its second start on."""

    def start_again(self) -> None:
        tied = [sys.executable, "-I", "-S", reaper.__file__, reaper.TIED_TO, str(os.getpid())]
        tell = "import sys, time; print(flush=True); time.sleep(600)"
        self.process = subprocess.Popen([*tied, sys.executable, "-I", "-S", "-c", tell], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n", "it has not become the command"
        self.started.put(self.process)


@pytest.fixture
def tied_ray():
    fake = TiedRay()
    yield fake
    fake.process.kill()
    fake.process.wait()
    while not fake.started.empty():
        fake.started.get().stdout.close()


def test_what_is_tied_ends_with_its_thread_though_the_process_goes_on(tied_ray: TiedRay):
    """Which is why the keeper's thread may not end before its time."""
    first, thread = tied_ray.process, threading.Thread(target=tied_ray.start_again)
    thread.start()
    thread.join()
    assert tied_ray.process.wait(LIMIT_S) == -signal.SIGKILL
    assert first.poll() is None
    first.kill()
    first.wait()


def test_the_keeper_outlives_what_fails_on_its_thread(tied_ray: TiedRay, monkeypatch):
    """Who hears of losses has gone, and there are no descriptors: a started GCS goes on, and so does the next."""
    monkeypatch.setattr(kept_process, "MAX_PAUSE_S", 0.01)
    failed: queue.Queue[None] = queue.Queue()
    pidfd_open = os.pidfd_open

    def say(text: str) -> None:
        failed.put(None)
        raise BrokenPipeError

    def open_none(pid: int) -> int:
        if failed.qsize() == 1:
            failed.put(None)
            raise OSError(errno.EMFILE, "no descriptors")
        return pidfd_open(pid)

    with kept_gcs(tied_ray, say, lambda: True):
        monkeypatch.setattr(os, "pidfd_open", open_none)
        tied_ray.started.get().kill()
        second = tied_ray.started.get(timeout=LIMIT_S)
        while failed.qsize() < 2:
            assert second.poll() is None
            select.select([], [], [], 0.01)
        assert second.poll() is None, "the keeper's thread has ended, and it with it"
        second.kill()
        assert tied_ray.started.get(timeout=LIMIT_S).poll() is None


def test_a_gcs_that_hangs_is_ended_and_starts_again(ray: FakeRay):
    said: list[str] = []
    first = ray.started.get()  # never answers; the next one always does
    answered: queue.Queue[None] = queue.Queue()

    def answers() -> bool:
        if ray.process is first:
            return False
        answered.put(None)
        return True

    with kept_gcs(ray, said.append, answers, look_every_s=0.01, silent_s=0.05):
        assert first.wait(LIMIT_S) == -signal.SIGKILL
        second = ray.started.get(timeout=LIMIT_S)
        for _ in range(10):  # looks, together longer than the silence that ends one
            answered.get(timeout=LIMIT_S)
        assert second.poll() is None, "it answers"
    assert "has not answered" in said[0]


def test_only_a_long_silence_means_that_it_hangs():
    silence = Silence(answered_s=0.0)
    assert not silence.note(has_answered=False, now_s=SILENT_S - 1)
    assert not silence.note(has_answered=True, now_s=SILENT_S)
    assert not silence.note(has_answered=False, now_s=2 * SILENT_S - 1)
    assert silence.note(has_answered=False, now_s=2 * SILENT_S)
    assert not silence.note(has_answered=False, now_s=3 * SILENT_S - 1), "the next one gets as long to start"
    assert silence.note(has_answered=False, now_s=3 * SILENT_S)
