"""A program whose wall clock, and that of all processes of its cluster, jumps under load; it prints what came of it.

    LD_PRELOAD=jumping_clock.so HOLDFAST_TEST_CLOCK=FILE python -m tests.chaos.clock_jumps FOLDER

Its clients are in this process, so they jump too.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import grpc
import httpx
import psutil

from holdfast.router.router_losses import RouterLoss
from tests import loops
from tests.chaos.forked import POLL_S, ForkedCluster, forked_cluster
from tests.chaos.jumping_clock import HOUR_S, YEAR_S, JumpingClock
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row
from tests.chaos.test_poison import POISON, Kept, by_async_client
from tests.fakes import FakeReplica
from tests.router.api.test_keys_by_api import locked
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import Site, collected, expected, refusal, request, site, with_key

OFFSETS_S = {"+1 h": HOUR_S, "-1 h": -HOUR_S, "+10 years": 10 * YEAR_S, "back": 0.0}
NUM_CLIENTS = 4
MAX_TOKENS = 60
LIMIT_S = 300.0
TIMEOUT_MS = 60_000
PER_MINUTE = 3
"""Requests of a key. They come slower than the other steps of the test, so that it has none left."""


async def http_stream(address: str, begun: asyncio.Event) -> str:
    """A stock client's stream, its text."""
    body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "seed": 4, "stream": True, "ignore_eos": True}
    text = ""
    url = f"http://{address}/v1/completions"
    async with httpx.AsyncClient(timeout=30) as client, client.stream("POST", url, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                begun.set()
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def jump(clock: JumpingClock, to_s: float, cluster: ForkedCluster, load: Load, right: str) -> Row:
    """While streams of both protocols run; then a replica and a router are lost."""
    row, begun = Row(num_faults=1), asyncio.Event()
    await load.under_way(NUM_CLIENTS - 1)
    stream = asyncio.create_task(http_stream(cluster.routers[0].http_address, begun))
    await begun.wait()
    assert not stream.done(), "it was over before"
    struck_s = time.monotonic()
    clock.jump(to_s)
    row.pauses_s += await load.settle(struck_s)
    assert await stream == right
    await load.judge_all(row)
    await lose_a_replica(cluster, load)
    await lose_a_router(cluster, load)
    await load.judge_all(row)
    return row


async def lose_a_replica(cluster: ForkedCluster, load: Load) -> None:
    await load.under_way(NUM_CLIENTS - 1)
    lost = await cluster.serving_replica(lambda: False)
    assert lost is not None
    struck_s = time.monotonic()
    lost.send(9)
    await load.settle(struck_s)
    cluster.forget(lost)
    await cluster.add_replica()


async def cluster_jumps(clock: JumpingClock, folder: Path) -> dict[str, dict]:
    """Streams are as without jumps, and what ends routers stays known, however long ago it seems to be."""
    kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    rows = {}
    async with forked_cluster(folder, poison=POISON, step_s=0.01) as cluster:
        right = await http_stream(cluster.routers[0].http_address, asyncio.Event())
        async with poisoned(cluster) as kept, steady_load(cluster.addresses, kinds, NUM_CLIENTS) as load:
            num_ended = kept.num_ended
            for number, (name, offset_s) in enumerate(OFFSETS_S.items(), 1):
                row = await jump(clock, offset_s, cluster, load, right)
                await by_async_client(cluster, f"{POISON} kills")
                assert kept.num_ended == num_ended + number, "what ends routers was forgotten"
                rows[name] = asdict(row)
    return rows


async def lose_a_router(cluster: ForkedCluster, load: Load) -> None:
    """The one that takes its place starts after the jump, and learns from files that were written before."""
    await load.under_way(NUM_CLIENTS - 1)
    lost = cluster.routers[0]
    struck_s = time.monotonic()
    lost.send(9)
    await load.settle(struck_s)
    while cluster.routers[0] is lost:
        await asyncio.sleep(POLL_S)
    await cluster.until_up()


@asynccontextmanager
async def poisoned(cluster: ForkedCluster) -> AsyncIterator[Kept]:
    """Routers know a request that has ended some of them, and are replaced."""
    kept = Kept(cluster, ())
    keeping = asyncio.create_task(kept.keep())
    await by_async_client(cluster, f"{POISON} kills")
    while kept.num_ended < 2 or not all(psutil.pid_exists(router.pid) for router in cluster.routers):
        await asyncio.sleep(POLL_S)
    await cluster.until_up()
    yield kept
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping


# --- keys, rates, deadlines and metrics of one router in this process ---


async def router_jumps(clock: JumpingClock) -> None:
    replica = await FakeReplica.start()
    keys = key_of("a", requests_per_minute=PER_MINUTE), key_of("b")
    async with site(replica, http=True, **locked(*keys, max_timeout_s=120)) as place:
        for offset_s in OFFSETS_S.values():
            await one_jump(place, replica, clock, offset_s)
        clock.jump(0.0)
        await check_metrics(place)


async def one_jump(place: Site, replica: FakeReplica, clock: JumpingClock, offset_s: float) -> None:
    """What waits for a long time goes on, what waits for a short time ends, and nobody is refused who was let in."""
    a, b = with_key(secret_of("a")), with_key(secret_of("b"))
    await use_up_the_rate(place)
    replica.pause()
    seen = len(replica.submits)
    stream = place.stub.GenerateStream
    asked = [request(seed=number, timeout_ms=TIMEOUT_MS) for number in range(4)]
    long = [asyncio.create_task(collected(stream(one, metadata=b))) for one in asked]
    timed = asyncio.create_task(collected(stream(request(seed=4), metadata=b, timeout=60)))
    short = asyncio.create_task(refusal(place.stub.Generate(request(timeout_ms=1500), metadata=b)))
    await replica.until(lambda: len(replica.submits) == seen + 6)
    began_s = time.monotonic()
    watch = place.router.poison_watch
    loss = RouterLoss(digest=f"{seen:032x}", router=f"router of {offset_s}", at_s=watch.now() - 1.0)
    watch.note([loss])
    clock.jump(offset_s)
    assert loss in watch.known_losses(), "forgotten early"
    late = asyncio.create_task(collected(stream(request(seed=5), metadata=b, timeout=60)))
    refused = await refusal(place.stub.Generate(request(max_tokens=1), metadata=a))
    assert refused.code == "RESOURCE_EXHAUSTED", refused
    assert refused.retry_after_s is not None
    assert 0.0 < refused.retry_after_s <= 60 / PER_MINUTE + 0.01, refused
    assert (await short).code == "DEADLINE_EXCEEDED"
    assert 1.0 <= time.monotonic() - began_s < 30.0
    assert not any(one.done() for one in (*long, timed, late)), "a deadline came early"
    replica.resume()
    for number, stream in enumerate((*long, timed, late)):
        assert "".join(chunk.text for chunk in await stream) == expected("hello", number, 8)[1]
    assert (await refusal(place.stub.Generate(request(), metadata=with_key("hfk_nobody")))).code == "UNAUTHENTICATED"


async def use_up_the_rate(place: Site) -> None:
    with suppress(grpc.aio.AioRpcError):
        while True:
            await place.stub.Generate(request(max_tokens=1), metadata=with_key(secret_of("a")))


async def check_metrics(place: Site) -> None:
    """No duration is negative, and none is of an hour."""
    async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client:
        text = (await client.get("/metrics", headers={"authorization": f"Bearer {place.key}"})).text
    seconds = re.findall(r"^(holdfast_\w*_seconds(?:_sum|_total)?(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    assert len(seconds) > 5, text
    for name, value in seconds:
        assert 0.0 <= float(value) < HOUR_S, (name, value)


def main(folder: Path) -> None:
    clock = JumpingClock.of_this_process()
    before_s = time.time()
    clock.jump(HOUR_S)
    assert time.time() - before_s > HOUR_S - 1, "the library stands before no clock"
    clock.jump(0.0)

    async def run() -> dict[str, dict]:
        await router_jumps(clock)
        return await cluster_jumps(clock, folder)

    print(json.dumps(loops.run(run(), timeout_s=LIMIT_S)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
