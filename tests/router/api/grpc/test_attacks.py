"""Floods over raw HTTP/2: what they cost is bounded, who sends them is cut off, and honest calls are served."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from holdfast.router.api.connection_guard import LOG_S
from holdfast.router.config import RouterConfig
from holdfast.router.security.connection_budgets import ENDING_STREAMS
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import Site, eventually, request, site, with_key

CONNECTIONS = 10
MAX_ALIVE = RouterConfig().max_concurrent_streams + ENDING_STREAMS
"""Streams that one connection makes this process keep at any time."""

HONEST = 150


class Attack:
    """A flood from a process of its own, which `started` runs."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @classmethod
    @contextmanager
    def started(
        cls, place: Site, attack: str, num_connections: int, num_frames: int, key: str = ""
    ) -> Iterator["Attack"]:
        command = [sys.executable, "-m", "tests.router.api.grpc.http2_attacker", place.router.address, attack]
        command += [str(num_connections), str(num_frames), *([key] if key else [])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            yield cls(process)
        finally:
            process.kill()
            process.communicate()

    async def num_closed(self, wanted: int) -> int:
        """Its connections that the server has closed, once all is sent and so many are."""
        return await asyncio.to_thread(self._num_closed, wanted)

    def _num_closed(self, wanted: int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"sent\n"
        self._process.stdin.write(b"%d\n" % wanted)
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


async def honest_calls(place: Site, key: str, number: int = HONEST) -> int:
    """How many calls on a connection of their own are answered."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(place.router.address, options=own) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one(turn: int) -> bool:
            await asyncio.sleep(0.01 * turn)
            return bool((await stub.Generate(request(max_tokens=4), metadata=with_key(key))).completions)

        answers = await asyncio.gather(*(one(turn) for turn in range(number)), return_exceptions=True)
    assert all(answer is True for answer in answers), [answer for answer in answers if answer is not True][:3]
    return len(answers)


MAX_HELD_S = 3.0
"""CPU time of one turn of the loop: 0.2 s on a quiet machine, and 8 to 12 s without budgets."""


async def longest_hold(over: asyncio.Event) -> float:
    """The most CPU time that this loop's thread has spent between two of its turns, in seconds."""
    longest = 0.0
    while not over.is_set():
        before = time.thread_time()
        await asyncio.sleep(0.005)
        longest = max(longest, time.thread_time() - before)
    return longest


def memory_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def guard_of(place: Site):
    return place.router._ports._guard


@pytest.mark.parametrize("has_key", [False, True])
@on_a_loop
async def test_calls_that_are_reset_at_once_are_bounded_and_cut_off(has_key, caplog):
    """Ten connections send 1,000 calls each, and reset every one of them at once.

    gRPC refuses most of them, and how many reach the guard in a second depends on the machine. So the budget is one
    that each connection exceeds, however slow the machine is.
    """
    key, over = secret_of("a"), asyncio.Event()
    budget = {"max_resets_per_s" if has_key else "max_unauthenticated_calls_per_s": 1}
    async with site(await FakeReplica.start(step_s=0.0), **locked(key_of("a"), **budget)) as place:
        guard, began_at = guard_of(place), time.monotonic()
        watching = asyncio.create_task(longest_hold(over))
        before = memory_mib()
        flood = Attack.started(place, "resets", CONNECTIONS, 1_000, key if has_key else "")
        with caplog.at_level(logging.WARNING), flood as attack:
            assert await honest_calls(place, key) == HONEST
            assert await attack.num_closed(CONNECTIONS) == CONNECTIONS
        over.set()
        reason = "resets" if has_key else "calls_without_key"
        assert guard.num_cut == {("grpc", reason): CONNECTIONS}
        assert guard.num_resets < 2 * CONNECTIONS * MAX_ALIVE  # the rest was refused without work of this loop
        assert await watching < MAX_HELD_S  # gRPC hands over all calls that wait, at most `MAX_ALIVE` of a connection
        assert memory_mib() - before < 300
        warnings = [line.getMessage() for line in caplog.records if "was cut off" in line.getMessage()]
        assert 1 <= len(warnings) <= 1 + (time.monotonic() - began_at) / LOG_S
        assert all("127.0.0.1:" in warning and "limits.max_" in warning for warning in warnings)


@on_a_loop
async def test_a_proxy_some_of_whose_clients_are_hasty_is_not_cut_off():
    """Far more calls are reset than the budget has, on a connection most of whose calls are not."""
    replica, metadata = await FakeReplica.start(step_s=0.0), with_key(secret_of("a"))
    replica.pause()
    async with site(replica, **locked(key_of("a"), max_resets_per_s=1)) as place:
        for _ in range(30):
            hasty = place.stub.GenerateStream(request(), metadata=metadata)
            await replica.until(lambda: replica.running)
            hasty.cancel()
            await replica.until(lambda: replica.is_idle)
            for _ in range(3):
                await place.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        guard = guard_of(place)

        async def all_are_counted() -> bool:
            return guard.num_resets > 25

        await eventually(all_are_counted)
        assert not guard.num_cut
        replica.resume()


@pytest.mark.parametrize(
    ("attack", "num_frames", "num_closed"),
    [("pings", 2_000, 4), ("settings", 50_000, 0), ("continuations", 20_000, 0)],
)
@on_a_loop
async def test_floods_of_other_frames_cost_the_loop_nothing_and_memory_little(attack, num_frames, num_closed):
    """gRPC's own threads take them, and keep nothing. It closes connections that ping too often by itself."""
    key, over = secret_of("a"), asyncio.Event()
    async with site(await FakeReplica.start(step_s=0.0), **locked(key_of("a"))) as place:
        watching = asyncio.create_task(longest_hold(over))
        before = memory_mib()
        with Attack.started(place, attack, 4, num_frames) as flood:
            assert await honest_calls(place, key, 50) == 50
            assert await flood.num_closed(num_closed) == num_closed
        over.set()
        assert await watching < MAX_HELD_S
        assert memory_mib() - before < 150


@on_a_loop
async def test_connections_without_a_key_are_as_many_as_they_may_be_and_leave_room_for_others():
    replica, key = await FakeReplica.start(step_s=0.0), secret_of("a")
    async with site(replica, **locked(key_of("a"), max_unauthenticated_connections=20)) as place:
        guard = guard_of(place)
        await honest_calls(place, key, 1)
        with Attack.started(place, "silence", 60, 0) as attack:

            async def enough_are_cut() -> bool:
                return guard.num_cut["grpc", "connections_without_key"] >= 40

            await eventually(enough_are_cut, 20)
            assert await honest_calls(place, key, 5) == 5
            assert await attack.num_closed(40) >= 40
        await place.stub.Generate(request(), metadata=with_key(key))  # its connection was there first, and has a key


@on_a_loop
async def test_calls_beyond_a_connections_streams_wait_in_the_client_and_none_is_refused():
    config = RouterConfig(max_concurrent_streams=8, max_reconnect_s=0.1)
    async with site(await FakeReplica.start(step_s=0.0), config=config) as place:
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(place.router.address, options=own) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            answers = await asyncio.gather(*(stub.Generate(request(max_tokens=2)) for _ in range(200)))
    assert len(answers) == 200
