"""Streams of a live cluster are those of one process, are shared by its replicas, and leave nothing behind."""

import asyncio
from collections.abc import Callable

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.serve.start_up import Serving
from tests.integration.processes import ray_processes
from tests.integration.streams import NUM_STREAMS, Answer, Wish, ask, is_idle, long_wish, until, wish

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


async def _sixty_four_streams(address: str) -> list[Answer]:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, wish(number)) for number in range(NUM_STREAMS)))
        await until(lambda: is_idle(client), 10.0)
    return answers


def test_64_streams_are_right_and_those_that_are_cut_leak_nothing(
    cluster: Serving, expected: Callable[[list[Wish]], list[Answer]]
):
    processes = {process.pid for process in ray_processes()}
    wishes = [wish(number) for number in range(NUM_STREAMS)]
    answers = asyncio.run(_sixty_four_streams(cluster.routers[0]))
    num_whole = 0
    for made, answer, right in zip(wishes, answers, expected(wishes), strict=True):
        assert answer.error is None
        if made.leaves_after is None:
            assert (answer.token_ids, answer.text, answer.finish_reason) == (
                right.token_ids,
                right.text,
                right.finish_reason,
            )
            num_whole += 1
        else:
            assert answer.token_ids == right.token_ids[: len(answer.token_ids)]
    assert num_whole == 42
    assert {process.pid for process in ray_processes()} == processes


async def _both_replicas_work(address: str) -> int:
    async with AsyncClient(address) as client:
        answers = asyncio.gather(*(ask(client, long_wish(number)) for number in range(16)))
        busy: set[str] = set()
        while len(busy) < 2:
            load = await client.get_load()
            busy |= {replica.replica_id for replica in load.replicas if replica.num_running > 0}
            await asyncio.sleep(0.01)
        await answers
        return len(busy)


def test_both_replicas_share_the_work(cluster: Serving):
    assert asyncio.run(asyncio.wait_for(_both_replicas_work(cluster.routers[0]), 60)) == 2
