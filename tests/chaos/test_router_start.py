"""A router that takes the place of another must not keep clients waiting, once its libraries are loaded."""

import signal
import time
from pathlib import Path

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from tests import loops
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Answer, ask

LIMIT_S = 120
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

NUM_STARTS = 2
FIRST_TOKEN_S = 2.0
"""For the fastest, so that a busy machine does not matter."""


async def first_token_after(cluster: ForkedCluster) -> float:
    """Seconds from a router's fork: it listens, finds the replicas, reads the tokenizer and answers."""
    begun_s = time.monotonic()
    router = await cluster.add_router()
    async with AsyncClient(router.address) as client:
        answer: Answer = await ask(client, KINDS[0])
    router.send(signal.SIGKILL)
    assert answer.is_whole
    return answer.arrivals_s[0] - begun_s


def test_a_router_gives_its_first_token_within_two_seconds(tmp_path: Path):
    async def run() -> list[float]:
        async with forked_cluster(tmp_path) as cluster:
            seconds: list[float] = []
            while len(seconds) < NUM_STARTS and min(seconds, default=FIRST_TOKEN_S) >= FIRST_TOKEN_S:
                seconds.append(await first_token_after(cluster))
            return seconds

    seconds = loops.run(run(), timeout_s=LIMIT_S)
    print(f"first tokens after {', '.join(f'{first_s:.2f}' for first_s in seconds)} s")
    assert min(seconds) < FIRST_TOKEN_S
