"""A leader keeps a guardian, whatever becomes of it, and is never held up by it."""

import asyncio
import os
import signal

import pytest

from holdfast.worker.supervision.heartbeat_pipe import Lifeline

TIMEOUT_S = 30


def test_another_takes_the_place_of_a_guardian_that_was_killed(monkeypatch):
    monkeypatch.setattr("holdfast.worker.supervision.heartbeat_pipe.START_AGAIN_AFTER_S", 0.0)

    async def kill_it() -> None:
        lifeline = Lifeline(1000, [])
        beating = asyncio.create_task(lifeline.keep_beating())
        first = lifeline.guardian
        first.kill()
        async with asyncio.timeout(TIMEOUT_S):
            while (second := lifeline.guardian) == first:
                await asyncio.sleep(0.01)
        lifeline.cut()
        lifeline.cut()
        await beating
        with pytest.raises(ProcessLookupError):
            second.open()

    asyncio.run(kill_it())


def test_a_process_whose_guardian_cannot_be_started_again_says_so_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("holdfast.worker.supervision.heartbeat_pipe.START_AGAIN_AFTER_S", 0.0)

    async def kill_it() -> None:
        lifeline = Lifeline(1000, [])
        lifeline._command = ["/no/such/program"]
        lifeline.guardian.kill()
        async with asyncio.timeout(TIMEOUT_S):
            await lifeline.keep_beating()
        lifeline.cut()

    asyncio.run(kill_it())
    assert "goes on without" in caplog.text


def test_a_guardian_that_is_stopped_holds_nobody_up():
    """A pipe takes 64 KiB."""
    lifeline = Lifeline(1000, [])
    os.kill(lifeline.guardian.pid, signal.SIGSTOP)
    for _ in range(70_000):
        lifeline._beat()
    lifeline.cut()
