"""Attempts and their tokens at the replica's end of the link, over real gRPC, with a pseudo-model behind it."""

import asyncio
import threading

import grpc
import pytest

from holdfast.v1 import engine_pb2
from tests.pseudo_model import pseudo_completion, pseudo_prompt_logprobs
from tests.worker.replica.link_peer import NUM_BLOCKS, Router, over_a_link


def test_many_attempts_share_one_stream(engine):
    async def scenario(router, server):
        for attempt in range(1, 21):
            await router.submit(attempt)
        await router.read_until(lambda: len(router.finished) == 20)
        for attempt in range(1, 21):
            assert router.tokens[attempt] == pseudo_completion((1, 2, 3), attempt, 6, 1000)
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_a_continued_attempt_starts_where_the_last_one_ended(engine):
    async def scenario(router, server):
        whole = pseudo_completion((1, 2, 3), 5, 6, 1000)
        await router.submit(5, output=whole[:4])
        await router.read_until(lambda: 5 in router.finished)
        assert router.tokens[5] == whole[4:]

    over_a_link(engine, scenario)


def test_attempts_of_a_group_share_their_prompt_and_those_of_another_router_do_not(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        prompt = range(1, 15)
        entered, gate = threading.Event(), threading.Event()
        engine._inbox.put(lambda: entered.set() or gate.wait())
        await asyncio.to_thread(entered.wait)
        for attempt in (1, 2, 3):
            await router.submit(attempt, prompt=prompt, max_tokens=50, group_id="g")
        while engine._inbox._commands.qsize() < 3:
            await asyncio.sleep(0.001)
        gate.set()
        await router.read_until(lambda: len(router.finished) == 3)
        num_forked = (await asyncio.to_thread(engine.stats)).num_forked_tokens
        assert num_forked == 2 * 13
        for attempt in (1, 2, 3):
            assert router.tokens[attempt] == pseudo_completion(prompt, attempt, 50, 1000)
        await router.submit(4, prompt=prompt, max_tokens=0, group_id="h")
        await router.read_until(lambda: router.tokens[4])
        await other.submit(1, prompt=prompt, max_tokens=4, group_id="h")
        await other.read_until(lambda: 1 in other.finished)
        assert (await asyncio.to_thread(engine.stats)).num_forked_tokens == num_forked
        await other.close()

    over_a_link(engine, scenario)


def test_a_suspect_of_one_router_is_told_to_the_other_alone(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        await router.submit(1, max_tokens=50, suspicion=engine_pb2.SUSPICION_SUSPECT)
        await other.read_until(lambda: other.load and other.load.num_foreign_suspects == 1)
        await other.read_until(lambda: other.load.num_foreign_suspects == 0)
        await router.read_until(lambda: router.tokens[1])
        assert router.load.num_foreign_suspects == 0
        await other.close()

    over_a_link(engine, scenario)


def test_logprobs_of_a_prompt_come_once_without_the_first_token(engine):
    async def scenario(router, server):
        prompt = range(1, 40)
        await router.submit(1, prompt=prompt, prompt_logprobs=0)
        await router.submit(2, prompt=prompt)
        await router.submit(3, prompt=prompt, prompt_logprobs=1025)
        await router.read_until(lambda: len(router.finished) == 2 and router.rejected)
        expected = pseudo_prompt_logprobs(prompt, 1000)
        assert router.prompt_logprobs[1] == [item.logprob for item in expected]
        assert router.prompt_logprobs[2] == []
        assert router.rejected[3].field == "sampling_params.prompt_logprobs"

    over_a_link(engine, scenario)


def test_an_abort_frees_the_attempts_blocks(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await router.abort(1)
        await router.read_until(lambda: 1 in router.finished)
        assert router.finished[1] == 3
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_a_router_that_goes_away_takes_its_requests_with_it(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        await other.submit(1, max_tokens=0)
        await other.read_until(lambda: other.tokens[1])
        await other.close()
        await router.submit(1, max_tokens=2)
        await router.read_until(lambda: 1 in router.finished and router.load.num_running == 0)
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_the_end_of_the_engine_ends_the_stream_with_unavailable(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await asyncio.to_thread(engine.stop)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await router.read_until(lambda: False)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE

    over_a_link(engine, scenario)
