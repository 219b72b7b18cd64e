"""Requests that end the router that reads them: they end as few as can be, and cost nobody else a token.

And the other way round: a router that is killed while it reads honest requests costs none of them.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import httpx2
import openai
import psutil
import pytest

from holdfast import AsyncClient, Client, HoldingTransport, SamplingParams
from holdfast.cluster.client.transport import SERVICE_CONFIG
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.errors import RequestQuarantinedError
from tests import loops
from tests.chaos.forked import POLL_S, ForkedCluster, forked_cluster

LIMIT_S = 150
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

POISON = "poison:"
NUM_STREAMS = 4
NUM_TOKENS = 120
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=0.9, ignore_eos=True)
NUM_WAITING = 50

Ask = Callable[[ForkedCluster, str], Awaitable[None]]


async def by_async_client(cluster: ForkedCluster, prompt: str) -> None:
    async with AsyncClient(cluster.addresses, draw=lambda: 0.0) as client:
        with pytest.raises(RequestQuarantinedError, match="router"):
            await client.generate(prompt, SamplingParams(max_tokens=2))


async def by_client(cluster: ForkedCluster, prompt: str) -> None:
    def ask() -> None:
        with Client(cluster.addresses, draw=lambda: 0.0) as client, pytest.raises(RequestQuarantinedError):
            list(client.stream(prompt, SamplingParams(max_tokens=2)))

    await asyncio.to_thread(ask)


async def by_holding_transport(cluster: ForkedCluster, prompt: str) -> None:
    """With the SDK's own retries on top."""
    addresses = [router.http_address for router in cluster.routers]
    http = httpx2.AsyncClient(transport=HoldingTransport(addresses, draw=lambda: 0.0, verify=False))
    url = f"http://{addresses[0]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=2, http_client=http) as client:
        with pytest.raises(openai.InternalServerError, match="router"):
            await client.completions.create(model="demo", prompt=prompt, max_tokens=2)


async def by_a_proxy(cluster: ForkedCluster, prompt: str) -> None:
    """Which sends a request that was lost to the next router, and the next, as a gateway does."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
    async with httpx2.AsyncClient(verify=False, timeout=20.0) as http:
        async with asyncio.timeout(60):
            while True:
                for router in list(cluster.routers):
                    try:
                        answer = await http.post(f"http://{router.http_address}/v1/completions", json=body)
                    except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                        continue
                    if answer.status_code == 500:
                        assert answer.json()["error"]["code"] == "quarantined"
                        assert answer.headers["x-should-retry"] == "false"
                        return
                    assert answer.status_code == 503, answer.text
                await asyncio.sleep(0.05)


async def by_stock_grpc(cluster: ForkedCluster, prompt: str) -> None:
    """With gRPC's own retries, over all routers."""
    target = f"ipv4:{','.join(cluster.addresses)}"
    asked = inference_pb2.GenerateRequest(text=prompt, sampling_params=inference_pb2.SamplingParams(max_tokens=2))
    async with grpc.aio.insecure_channel(target, options=[("grpc.service_config", SERVICE_CONFIG)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Generate(asked, wait_for_ready=True, timeout=20)
            if failed.value.code() is grpc.StatusCode.INTERNAL:
                assert "since it may end all of them" in failed.value.details()
                return
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE, failed.value
    raise AssertionError("it is never refused")


ASKS: list[Ask] = [by_a_proxy, by_async_client, by_client, by_holding_transport, by_stock_grpc]


class Kept:
    """Replaces every router that ends, after a while, and counts them."""

    def __init__(self, cluster: ForkedCluster, streams: Sequence[asyncio.Task[str]]) -> None:
        self._cluster = cluster
        self._streams = streams
        self.num_ended = 0
        self.num_hit = 0
        """Routers that ended while streams were under way."""

    async def keep(self) -> None:
        while True:
            for router in list(self._cluster.routers):
                if not psutil.pid_exists(router.pid):
                    self.num_ended += 1
                    self.num_hit += not all(one.done() for one in self._streams)
                    await asyncio.sleep(0.3)
                    await self._cluster.replace_router(router)
            await asyncio.sleep(POLL_S)


async def streamed(cluster: ForkedCluster, number: int, has_begun: asyncio.Event) -> str:
    async with AsyncClient(cluster.addresses, draw=lambda: number % 2 / 2) as client:
        text = ""
        async for chunk in client.stream(f"Stream {number}", PARAMS):
            has_begun.set()
            text += chunk.text
        return text


@pytest.mark.parametrize(
    ("ask", "kind", "most"),
    [
        *(pytest.param(ask, "kills", 2, id=f"{ask.__name__}-kills") for ask in ASKS[:1]),
        *(pytest.param(ask, "kills", 2, id=f"{ask.__name__}-kills", marks=pytest.mark.slow) for ask in ASKS[1:]),
        *(pytest.param(ask, "hangs", 1, id=f"{ask.__name__}-hangs", marks=pytest.mark.slow) for ask in ASKS),
    ],
)
def test_a_request_that_ends_routers_ends_few_and_no_stream(ask: Ask, kind: str, most: int, tmp_path: Path):
    """Twice: what is known of it, the routers that are started later know too."""

    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.05 if kind == "hangs" else 0.02, poison=POISON) as cluster:
            whole = await asyncio.gather(*(streamed(cluster, n, asyncio.Event()) for n in range(NUM_STREAMS)))
            begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
            streams = [asyncio.create_task(streamed(cluster, number, begun[number])) for number in range(NUM_STREAMS)]
            kept = Kept(cluster, streams)
            keeping = asyncio.create_task(kept.keep())
            await asyncio.gather(*(one.wait() for one in begun))
            await ask(cluster, f"{POISON} {kind}")
            while not kept.num_ended:  # it may be answered before the end of the process is seen here
                await asyncio.sleep(POLL_S)
            assert kept.num_hit, "the streams were over before"
            assert await asyncio.gather(*streams) == whole
            assert 1 <= kept.num_ended <= most
            await ask(cluster, f"{POISON} {kind}")
            assert kept.num_ended <= most
            keeping.cancel()
            await asyncio.wait([keeping])

    loops.run(run(), timeout_s=LIMIT_S)


def test_a_router_that_is_killed_while_it_reads_loses_no_request(tmp_path: Path):
    """Fifty clients wait, some with long prompts that are still on their way, when their router is killed."""

    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.004) as cluster:
            params = SamplingParams(max_tokens=4, seed=1, truncate_prompt_tokens=64)
            prompts = [
                f"Request {number}. " + "word " * (10_000 if number % 2 else 10) for number in range(NUM_WAITING)
            ]
            async with AsyncClient(cluster.addresses, draw=lambda: 0.0) as client:
                asked = [asyncio.create_task(client.generate(prompt, params)) for prompt in prompts]
                first, watcher = cluster.routers[0], cluster.watchers[0]
                while not (await watcher.get_load()).num_open:
                    await asyncio.sleep(POLL_S)
                first.send(signal.SIGKILL)
                assert not all(one.done() for one in asked)
                heard = [one.completions[0].text for one in await asyncio.gather(*asked)]
                whole = await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
                again = [one.completions[0].text for one in whole]
            assert heard == again

    loops.run(run(), timeout_s=LIMIT_S)
