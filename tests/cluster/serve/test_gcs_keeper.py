"""The keeper of a GCS starts it again each time that it ends, and ends one that hangs."""

import queue
import signal
import subprocess
import sys

import pytest

from holdfast.cluster.serve.gcs_keeper import SILENT_S, Silence, kept_gcs

LIMIT_S = 60


class FakeRay:
    """Its GCS is a process that waits. `started` gets each one, the first as well."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self.gcs = self.start_gcs()

    def start_gcs(self) -> subprocess.Popen[bytes]:
        if self.num_refused:
            self.num_refused -= 1
            raise OSError("no memory")
        self.gcs = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        self.started.put(self.gcs)
        return self.gcs


@pytest.fixture
def ray():
    fake = FakeRay()
    yield fake
    fake.gcs.kill()
    fake.gcs.wait()


def test_a_gcs_that_ends_starts_again_as_often_as_it_ends(ray: FakeRay):
    said: list[str] = []
    with kept_gcs(ray, said.append, lambda: True):
        for number in range(4):
            ray.started.get(timeout=LIMIT_S).kill()
            assert len(said) >= number, "who has been started was asked for"
        ray.started.get(timeout=LIMIT_S)
    assert len(said) == 4
    assert all("Ray's GCS has ended (signal 9)" in line for line in said)
    assert ray.gcs.poll() is None, "the keeper's end is not that of the GCS"


def test_a_start_that_fails_is_tried_again(ray: FakeRay):
    with kept_gcs(ray, lambda text: None, lambda: True):
        first = ray.started.get(timeout=LIMIT_S)
        ray.num_refused = 2
        first.kill()
        ray.started.get(timeout=LIMIT_S)
    assert ray.num_refused == 0


def test_a_gcs_that_hangs_is_ended_and_starts_again(ray: FakeRay):
    said: list[str] = []
    first = ray.started.get()  # never answers; the next one always does
    answered: queue.Queue[None] = queue.Queue()

    def answers() -> bool:
        if ray.gcs is first:
            return False
        answered.put(None)
        return True

    with kept_gcs(ray, said.append, answers, look_every_s=0.01, silent_s=0.05):
        assert first.wait(LIMIT_S) == -signal.SIGKILL
        second = ray.started.get(timeout=LIMIT_S)
        for _ in range(10):  # looks, together longer than the silence that ends one
            answered.get(timeout=LIMIT_S)
        assert second.poll() is None, "it answers"
    assert "answered nothing" in said[0]


def test_only_a_long_silence_means_that_it_hangs():
    silence = Silence(answered_s=0.0)
    assert not silence.note(has_answered=False, now_s=SILENT_S - 1)
    assert not silence.note(has_answered=True, now_s=SILENT_S)
    assert not silence.note(has_answered=False, now_s=2 * SILENT_S - 1)
    assert silence.note(has_answered=False, now_s=2 * SILENT_S)
    assert not silence.note(has_answered=False, now_s=3 * SILENT_S - 1), "the next one gets as long to start"
    assert silence.note(has_answered=False, now_s=3 * SILENT_S)
