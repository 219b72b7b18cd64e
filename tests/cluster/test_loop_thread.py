"""A loop's thread: whoever waits on it is answered when it ends, and whoever comes later too."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from holdfast.cluster.client.blocking_client import Client
from holdfast.cluster.loop_thread import LoopThread
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.in_thread import in_thread
from tests.loops import on_a_loop
from tests.router.site import eventually, num_open_is, site

ENDLESS = SamplingParams(max_tokens=90_000, seed=1)


class Closed(Exception):
    pass


async def _answer() -> int:
    return 1


def test_who_waits_when_it_is_closed_is_answered_and_who_comes_later():
    thread, waits = LoopThread("a loop", Closed), threading.Event()

    async def forever() -> None:
        waits.set()
        await asyncio.Event().wait()

    waiting = in_thread(lambda: thread.run(forever()))
    assert waits.wait(30)
    closings = [in_thread(thread.close) for _ in range(3)]
    assert isinstance(waiting.exception(30), Closed)
    assert [closing.result(30) for closing in closings] == [None] * 3
    with pytest.raises(Closed):
        thread.run(_answer())
    assert thread.loop.is_closed()


def test_what_is_to_be_done_last_is_done_and_its_error_is_raised():
    thread, done = LoopThread("a loop", Closed), []

    async def last() -> None:
        done.append(asyncio.get_running_loop() is thread.loop)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        thread.close(last())
    assert done == [True]
    assert thread.loop.is_closed()


def test_the_error_of_what_runs_is_raised_and_an_inner_cancellation_is_no_end():
    thread = LoopThread("a loop", Closed)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        thread.run(broken())
    assert not isinstance(in_thread(lambda: thread.run(cancelled())).exception(30), Closed)
    assert thread.run(_answer()) == 1
    thread.close()


@on_a_loop
async def test_closing_a_client_answers_whoever_waits_for_it_on_another_thread():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        client = await asyncio.to_thread(Client, place.router.address)
        begun = client.stream("hello", ENDLESS)
        assert await asyncio.to_thread(next, begun)
        fresh = client.stream("hello", ENDLESS)
        whole = in_thread(lambda: client.generate("hello", ENDLESS))
        await eventually(lambda: num_open_is(place, 2))
        await asyncio.to_thread(client.close)
        for waiting in (whole, in_thread(lambda: list(begun)), in_thread(lambda: next(fresh))):
            error = await asyncio.wrap_future(_error(waiting))
            assert isinstance(error, RuntimeError)
        assert isinstance(in_thread(lambda: client.generate("hello")).exception(30), RuntimeError)
        await asyncio.to_thread(client.close)
        await place.until_idle()


def _error(done: Future) -> Future:
    return in_thread(lambda: done.exception(30))


@pytest.mark.parametrize("closed", [[0], [2], [0, 1, 2]])
def test_a_process_whose_parent_closed_its_standard_streams_ends_in_order(closed):
    """libuv asserts that what it closes is no standard stream."""
    pytest.importorskip("uvloop")
    program = f"""
import os, socket
[os.close(number) for number in {closed}]
import uvloop
from holdfast.cluster.loop_thread import LoopThread
loop = LoopThread("test", RuntimeError, uvloop.new_event_loop)
assert socket.socket().fileno() > 2
assert all(os.get_inheritable(number) for number in {closed})
loop.close()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
