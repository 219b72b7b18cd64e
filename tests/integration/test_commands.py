import asyncio
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from benchmarks.free_port import pick_port
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LIMIT_S = 150
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


class Command:
    """A running command of Holdfast's and the lines it prints. Nothing in its environment configures Ray."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        )
        self.lines: list[str] = []
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, pattern: str) -> "re.Match[str]":
        """The first match in a line that is still to come."""
        while (line := self._news.get(timeout=LIMIT_S)) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("\n".join(self.lines))

    def finish(self) -> str:
        """All that was printed, once the command has ended."""
        self.process.wait(LIMIT_S)
        while (line := self._news.get(timeout=LIMIT_S)) is not None:
            self.lines.append(line)
        return "\n".join(self.lines)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(line.rstrip())
        self._news.put(None)


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts a command, and kills it in the end if it is still there."""
    commands: list[Command] = []

    def start_one(*arguments: str) -> Command:
        commands.append(Command(*arguments))
        return commands[-1]

    yield start_one
    for command in commands:
        if command.process.poll() is None:
            for process in [*command.descendants(), command.process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


async def _stream_through_a_signal(address: str, process: "subprocess.Popen[str]") -> tuple[int, FinishReason | None]:
    num_tokens, finish_reason = 0, None
    async with AsyncClient(address) as client:
        async for chunk in client.stream("The capital of France is", LONG):
            if num_tokens == 0:
                os.kill(process.pid, signal.SIGTERM)
            num_tokens += len(chunk.token_ids)
            finish_reason = chunk.finish_reason
    return num_tokens, finish_reason


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_serve_prints_a_command_that_works_and_a_signal_lets_streams_finish(start: Callable[..., Command]):
    command = start("holdfast.cluster.commands.cli", "serve", "--replicas", "1", "--port", "0")
    tried = shlex.split(command.wait_for(r"try: holdfast (.*)").group(1))
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast.cluster.commands.cli", *tried], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    address, other = tried[tried.index("--server") + 1].split(",")
    assert other != address
    processes = command.descendants()
    assert asyncio.run(_stream_through_a_signal(address, command.process)) == (150, FinishReason.LENGTH)
    printed = command.finish()
    assert command.process.returncode == 0, printed
    assert "Traceback" not in printed
    assert_all_gone(processes)


@pytest.mark.slow
def test_an_interrupt_while_starting_leaves_nothing_behind(start: Callable[..., Command]):
    command = start("holdfast.cluster.commands.cli", "serve", "--port", "0")
    command.wait_for(r"starting processes")
    processes = command.descendants()
    assert processes
    command.process.send_signal(signal.SIGINT)
    printed = command.finish()
    assert command.process.returncode == 130, printed
    assert "Traceback" not in printed
    assert_all_gone(processes)


@pytest.mark.slow  # on the cluster that is up, live_cluster/test_demo.py runs it every time
def test_the_demo_streams_four_prompts_kills_a_replica_and_exits_cleanly(start: Callable[..., Command]):
    command = start("holdfast.cluster.demo.run")
    command.wait_for(r"up after")
    processes = command.descendants()
    printed = command.finish()
    print(printed)
    assert command.process.returncode == 0, printed
    assert all(re.search(rf"^\[{number}\]", printed, re.MULTILINE) for number in (1, 2, 3, 4))
    assert "tokens/s" in printed
    assert "kill -9" in printed
    assert printed.count("identical") == 4
    assert "Traceback" not in printed
    assert_all_gone(processes)


async def _stream_through_the_end_of_ray(addresses: list[str], serve: Command) -> tuple[list[int], list[int]]:
    """Token ids of a stream under which Ray is killed, and of the same request afterwards."""

    async def ask(on_first: Callable[[], None]) -> list[int]:
        token_ids: list[int] = []
        async for chunk in client.stream("The capital of France is", LONG, timeout_s=LIMIT_S):
            if not token_ids:
                on_first()
            token_ids += chunk.token_ids
        return token_ids

    def kill_ray() -> None:
        next(process for process in serve.descendants() if process.name() == "raylet").kill()

    async with AsyncClient(addresses) as client:
        return await ask(kill_ray), await ask(lambda: None)


@pytest.mark.slow  # without Ray, tests/cluster/serve/test_supervisor.py does it every time
def test_a_cluster_that_has_lost_its_ray_is_started_again_and_its_streams_go_on(start: Callable[..., Command]):
    ports = [part for name in ("--port", "--http-port") for part in (name, str(pick_port()))]
    command = start("holdfast.cluster.commands.cli", "serve", "--replicas", "1", *ports)
    addresses = re.findall(r"[\w.]+:\d+", command.wait_for(r"gRPC on (.*)").group(1))
    broken, whole = asyncio.run(_stream_through_the_end_of_ray(addresses, command))
    assert len(broken) == 150
    assert broken == whole
    assert any("starts again" in line for line in command.lines) or command.wait_for("starts again")
    processes = command.descendants()
    command.process.kill()
    assert_all_gone(processes)


@pytest.mark.slow
def test_streams_outlive_the_end_of_every_process(start: Callable[..., Command]):
    command = start("holdfast.cluster.commands.cli", "demo", "--blackout")
    printed = command.finish()
    assert command.process.returncode == 0, printed
    assert re.search(r"kill -9 of all \d\d processes", printed)
    assert printed.count("identical") == 4
    assert "Traceback" not in printed
