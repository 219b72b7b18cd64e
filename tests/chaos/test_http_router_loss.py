"""Routers that are killed under streams of a stock HTTP client: over `HoldingTransport` its text is as if none was."""

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import openai
import pytest

from holdfast import HoldingTransport
from tests import loops
from tests.chaos.forked import ForkedCluster, forked_cluster

LIMIT_S = 150
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

NUM_TOKENS = 24
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Tell me of Paris."}], "n": 2, "seed": 11}
PARAMS = {"max_tokens": NUM_TOKENS, "temperature": 0.9, "logprobs": True, "extra_body": {"ignore_eos": True}}

Fault = Callable[[ForkedCluster, HoldingTransport], Awaitable[None]]


async def text_of(cluster: ForkedCluster, fault: Fault | None = None, after: int = 0) -> tuple[list[str], list[int]]:
    """Texts and numbers of tokens of a chat's choices, under which a fault comes after so many tokens."""
    addresses = [router.http_address for router in cluster.routers]
    transport = HoldingTransport(addresses, draw=lambda: 0.0, verify=False)
    http = httpx2.AsyncClient(transport=transport)
    url = f"http://{addresses[0]}/v1"
    texts, counts, has_come = ["", ""], [0, 0], fault is None
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
        async for chunk in await client.chat.completions.create(**ASKED, **PARAMS, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            if fault is not None and not has_come and sum(counts) >= after:
                has_come = True
                assert sum(counts) < 2 * NUM_TOKENS, "the fault comes too late"
                await fault(cluster, transport)
    assert has_come
    return texts, counts


async def kill_its_router(cluster: ForkedCluster, transport: HoldingTransport) -> None:
    lost = cluster.routers[transport.at]
    lost.send(signal.SIGKILL)
    await cluster.replace_router(lost)


async def kill_both(cluster: ForkedCluster, transport: HoldingTransport) -> None:
    lost = list(cluster.routers)
    for router in lost:
        router.send(signal.SIGKILL)
    for router in lost:
        await cluster.replace_router(router)


@pytest.mark.parametrize("cuts", [(12,), pytest.param(range(1, 46, 2), marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_killed_router_is_not_seen_in_a_chat_of_a_stock_client(cuts, tmp_path: Path):
    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.02) as cluster:
            whole = await text_of(cluster)
            assert whole[1] == [NUM_TOKENS] * 2
            assert whole[0][0] != whole[0][1]
            for number, cut in enumerate(cuts):
                fault = kill_both if number % 2 else kill_its_router
                assert await text_of(cluster, fault, cut) == whole, (cut, fault.__name__)

    loops.run(run(), timeout_s=LIMIT_S)
