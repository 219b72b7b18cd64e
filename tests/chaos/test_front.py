"""A router is killed under streams of stock clients that call the front: every one is as in a run without faults."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import httpx2
import openai
import pytest

from holdfast.router.wire.resume_codec import MARK
from tests import loops
from tests.chaos.forked import POLL_S, ForkedCluster, forked_cluster

LIMIT_S = 150
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

NUM_TOKENS = 60
Ask = Callable[[str, int], Awaitable[str]]


@asynccontextmanager
async def front_before(cluster: ForkedCluster) -> AsyncIterator[str]:
    """The command, as anyone runs it."""
    routers = ",".join(router.http_address for router in cluster.routers)
    command = [sys.executable, "-m", "holdfast", "front", "--routers", routers, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = await asyncio.to_thread(process.stderr.readline)
        assert "the front is at http://" in line, line
        yield line.partition("http://")[2].partition(",")[0]
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
        process.stderr.close()


async def by_openai_chat(address: str, seed: int) -> str:
    http = httpx2.AsyncClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http
    ) as client:
        asked = {"model": "demo", "messages": [{"role": "user", "content": f"Tell me {seed}."}], "seed": seed, "n": 2}
        stream = await client.chat.completions.create(
            **asked, max_tokens=NUM_TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return "|".join(texts)


async def by_openai_whole(address: str, seed: int) -> str:
    http = httpx2.AsyncClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="x", max_retries=0, http_client=http
    ) as client:
        answer = await client.completions.create(
            model="demo", prompt=f"Once {seed}", seed=seed, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


async def by_anthropic(address: str, seed: int) -> str:
    http = httpx2.AsyncClient(verify=False)
    url = f"http://{address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, http_client=http) as client:
        asked = {"model": "demo", "max_tokens": NUM_TOKENS, "messages": [{"role": "user", "content": "Tell me."}]}
        stream = await client.messages.create(stream=True, **asked, extra_body={"seed": seed, "ignore_eos": True})
        return "".join([one.delta.text async for one in stream if one.type == "content_block_delta"])


def body_of(seed: int) -> str:
    asked = {"model": "demo", "prompt": f"Twice {seed}", "seed": seed, "max_tokens": NUM_TOKENS, "temperature": 0.9}
    return json.dumps({**asked, "stream": True, "ignore_eos": True})


async def by_httpx(address: str, seed: int) -> str:
    async with httpx2.AsyncClient(verify=False, timeout=60) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post(f"http://{address}/v1/completions", content=body_of(seed), headers=headers)
        assert answer.status_code == 200
        return text_of(answer.text)


async def by_curl(address: str, seed: int) -> str:
    command = ["curl", "-sSN", "--fail", f"http://{address}/v1/completions", "--json", body_of(seed)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
    return text_of(done.stdout)


def text_of(stream: str) -> str:
    """Of a stream that came to its end."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    assert MARK.decode() not in stream
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


CLIENTS: list[Ask] = [by_openai_chat, by_openai_whole, by_anthropic, by_httpx, by_curl]
EIGHT = [*CLIENTS, by_openai_chat, by_httpx, by_curl]


def asking_by_all(address: str) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(ask(address, seed)) for seed, ask in enumerate(EIGHT)]


async def asked_by_all(address: str) -> list[str]:
    return await asyncio.gather(*asking_by_all(address))


async def all_are_read(cluster: ForkedCluster, asking: list[asyncio.Task[str]]) -> None:
    """Routers come up within a tenth of a second here: two that are killed while they read the same request would have
    it refused, as docs/failover.md says.
    """
    while sum(await num_open(cluster)) < sum(not one.done() for one in asking):
        await asyncio.sleep(POLL_S)


async def num_open(cluster: ForkedCluster) -> list[int]:
    return [(await watcher.get_load()).num_open for watcher in cluster.watchers]


@pytest.mark.parametrize(
    "kills", [1, pytest.param(6, marks=pytest.mark.slow)], ids=["one router", "one after the other"]
)
def test_stock_clients_lose_nothing_when_a_router_is_killed(kills: int, tmp_path: Path):
    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.02) as cluster, front_before(cluster) as address:
            whole = await asked_by_all(address)
            assert len(set(whole)) == len(EIGHT)
            asking = asking_by_all(address)
            while min(await num_open(cluster)) < 2:
                await asyncio.sleep(POLL_S)
            for number in range(kills):
                await all_are_read(cluster, asking)
                lost = cluster.routers[number % 2]
                if all(one.done() for one in asking):
                    assert number >= 3, "the faults come too late"
                    break
                lost.send(signal.SIGKILL)
                await cluster.replace_router(lost)
            assert await asyncio.gather(*asking) == whole

    loops.run(run(), timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S + 60)
def test_a_router_may_be_killed_at_any_moment_of_a_stream(tmp_path: Path):
    """Each client alone, and its router after every few milliseconds more."""

    async def run() -> None:
        async with forked_cluster(tmp_path, step_s=0.02) as cluster, front_before(cluster) as address:
            for ask in CLIENTS:
                whole, num_kills = await ask(address, 5), 0
                for after in range(24):
                    asking = asyncio.create_task(ask(address, 5))
                    router = await cluster.serving_router(asking.done)
                    await asyncio.sleep(after / 100)
                    if router is not None and not asking.done():
                        router.send(signal.SIGKILL)
                        await cluster.replace_router(router)
                        num_kills += 1
                    assert await asking == whole, (ask.__name__, after)
                assert num_kills >= 6, ask.__name__

    loops.run(run(), timeout_s=4 * LIMIT_S)
