"""A leader keeps a hang supervisor, whatever becomes of it, and is never held up by it."""

import asyncio
import os
import signal

import pytest

from holdfast.worker.replica.hang_verdict import BEAT
from holdfast.worker.replica.heartbeat_pipe import HeartbeatPipe

TIMEOUT_S = 30


def test_another_takes_the_place_of_a_hang_supervisor_that_was_killed(monkeypatch):
    monkeypatch.setattr("holdfast.worker.replica.heartbeat_pipe.START_AGAIN_AFTER_S", 0.0)

    async def kill_it() -> None:
        heartbeat_pipe = HeartbeatPipe(1000, [])
        beating = asyncio.create_task(heartbeat_pipe.keep_beating())
        first = heartbeat_pipe.hang_supervisor
        first.kill()
        async with asyncio.timeout(TIMEOUT_S):
            while (second := heartbeat_pipe.hang_supervisor) == first:
                await asyncio.sleep(0.01)
        heartbeat_pipe.cut()
        heartbeat_pipe.cut()
        await beating
        with pytest.raises(ProcessLookupError):
            second.open()

    asyncio.run(kill_it())


def test_a_process_whose_hang_supervisor_cannot_be_started_again_says_so_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("holdfast.worker.replica.heartbeat_pipe.START_AGAIN_AFTER_S", 0.0)

    async def kill_it() -> None:
        heartbeat_pipe = HeartbeatPipe(1000, [])
        heartbeat_pipe._command = ["/no/such/program"]
        heartbeat_pipe.hang_supervisor.kill()
        async with asyncio.timeout(TIMEOUT_S):
            await heartbeat_pipe.keep_beating()
        heartbeat_pipe.cut()

    asyncio.run(kill_it())
    assert "runs without one" in caplog.text


def test_a_hang_supervisor_that_is_stopped_holds_nobody_up():
    """A pipe takes 64 KiB."""
    heartbeat_pipe = HeartbeatPipe(1000, [])
    os.kill(heartbeat_pipe.hang_supervisor.pid, signal.SIGSTOP)
    for _ in range(70_000):
        heartbeat_pipe._write(BEAT)
    heartbeat_pipe.cut()
