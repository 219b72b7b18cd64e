"""What the replica's end of the link refuses: by field, and with the link going on for all others."""

import asyncio

import grpc
import pytest

from tests.router.api.grpc.paths import PATHS, send_path
from tests.worker.replica.link_peer import INFO, TIMEOUT_S, Router, over_a_link


def test_bad_attempts_are_rejected_by_field_and_the_link_goes_on(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=())
        await router.submit(2, temperature=float("nan"))
        await router.submit(3, prompt=range(30_000))
        await router.submit(4)
        await router.read_until(lambda: len(router.rejected) == 3 and 4 in router.finished)
        fields = {attempt: rejection.field for attempt, rejection in router.rejected.items()}
        assert fields == {1: "prompt", 2: "sampling_params.temperature", 3: "prompt"}

    over_a_link(engine, scenario)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xff\xff\xff", "the router has sent bytes that cannot be parsed"),
        (b"", "the router has sent a message of a kind that is not known here"),
    ],
)
def test_a_router_that_cannot_be_understood_is_told_so_and_the_others_go_on(engine, data, told):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream("/holdfast.v1.Engine/Link")()
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(drained(call), TIMEOUT_S)
            assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, told)
        num_before = len(router.tokens[1])
        await router.read_until(lambda: len(router.tokens[1]) > num_before)

    over_a_link(engine, scenario)


async def drained(call) -> None:
    async for _ in call:
        pass


def test_numbers_that_no_engine_must_get_are_refused_by_field(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[INFO.vocab_size])
        await router.submit(2, suspicion=9)
        await router.submit(3)
        await router.read_until(lambda: len(router.rejected) == 2 and 3 in router.finished)
        assert {key: item.field for key, item in router.rejected.items()} == {1: "prompt", 2: "suspicion"}
        assert "below the vocabulary's size, 1000" in router.rejected[1].message

    over_a_link(engine, scenario)


def test_an_attempt_that_comes_twice_is_refused_and_the_first_goes_on(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await router.submit(1)
        await router.read_until(lambda: 1 in router.rejected)
        num_before = len(router.tokens[1])
        await router.read_until(lambda: len(router.tokens[1]) > num_before)
        assert router.rejected[1].field == "request_id"

    over_a_link(engine, scenario)


def test_an_attempt_whose_time_is_up_is_rejected_as_late(engine):
    async def scenario(router, server):
        await router.submit(1, time_left_ms=0)
        await router.submit(2, time_left_ms=60_000)
        await router.read_until(lambda: 1 in router.rejected and 2 in router.finished)
        assert router.rejected[1].deadline_exceeded
        assert router.rejected[1].retry_after_ms == 0

    over_a_link(engine, scenario)


def test_a_path_that_is_no_text_does_not_end_the_link(engine):
    async def scenario(router, server):
        for path in PATHS:
            await send_path(server.address, path)
        second = Router(server.address)
        assert (await second.hello()).replica_id == "r0"
        await second.close()

    over_a_link(engine, scenario)
