"""A cluster where little is allowed, and one that is interrupted while it starts: each by `holdfast serve` itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast import Client, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]

START_S = 120
SERVE = [sys.executable, "-m", "holdfast", "serve", "--replicas", "1", "--routers", "1", "--port", "0"]
MARK = "HOLDFAST_TEST_MARK"

FEW_FILES = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash"]
LITTLE_SHARED_MEMORY = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64m t /dev/shm; exec "$@"', "bash"]


@contextmanager
def serving(
    folder: Path, *arguments: str, before: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and a mark that all of its descendants have."""
    mark = str(folder)
    environment = {**os.environ, MARK: mark, "XDG_RUNTIME_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [*(before or []), *SERVE, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        yield process, mark
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    """Of the gRPC API, once it is ready."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("ready"):
            return line.rpartition("gRPC on ")[2].split()[0]
    raise AssertionError("".join(said))


def left_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_ended_without_a_trace(process: subprocess.Popen[str], mark: str, folder: Path, code: int) -> None:
    said, _ = process.communicate(timeout=90)
    assert (process.returncode, "Traceback" in said) == (code, False), said
    _, alive = psutil.wait_procs(left_of(mark), timeout=30)
    assert alive == []
    assert list(folder.glob("holdfast/*.json")) == []


@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        pytest.param(FEW_FILES, (), id="256 files"),
        pytest.param(LITTLE_SHARED_MEMORY, (), id="64 MB of shared memory"),
        pytest.param([], ("--host", "::1"), id="IPv6"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGHUP])
def test_a_cluster_serves_and_ends_where_little_is_allowed(tmp_path, before, arguments, number):
    if before == LITTLE_SHARED_MEMORY and os.geteuid() != 0:
        pytest.skip("a mount of its own takes root")
    with serving(tmp_path, *arguments, before=before) as (process, mark):
        with Client(address_of(process)) as client:
            generation = client.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=3))
            assert len(generation.completions[0].token_ids) == 3
        process.send_signal(number)
        assert_ended_without_a_trace(process, mark, tmp_path, 0)


@pytest.mark.parametrize("after_s", [0.7, 1.5, 2.5, 4.0, 6.0])
def test_an_interrupt_in_any_phase_of_a_start_ends_it(tmp_path, after_s):
    with serving(tmp_path) as (process, mark):
        time.sleep(after_s)  # phases have no event that a signal from outside could wait for
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=90)
        assert process.returncode in (130, 0), said  # 0: it was ready already
        assert "Traceback" not in said
        _, alive = psutil.wait_procs(left_of(mark), timeout=30)
        assert alive == []
        assert list(tmp_path.glob("holdfast/*.json")) == []
