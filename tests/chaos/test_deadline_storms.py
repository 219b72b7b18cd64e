"""Storms of requests that have hardly any time: the streams beside them do not notice, even if a process dies."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import DeadlineExceededError, HoldfastError, ReplicaError
from holdfast.worker.sampling_params import SamplingParams
from tests.chaos.faults import KILLED_REPLICA, KILLED_ROUTER, Fault
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Answer, ask
from tests.chaos.tally import Tally
from tests.under_way import were_under_way

pytestmark = pytest.mark.timeout(180)

STRUCK_AT = 8
"""Tokens."""
NUM_AT_ONCE = 40
SHORTEST_S, LONGEST_S = 0.001, 1.0
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)
"""More than comes in the longest time."""
BURSTS_BEFORE = 2


class Storm:
    """Bursts of requests, and how they ended."""

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.num_bursts = 0
        self.has_risen = asyncio.Event()

    async def blow(self, client: AsyncClient) -> None:
        """Burst after burst, for ever."""
        rng = random.Random(1)
        while True:
            times_s = [SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.random() for _ in range(NUM_AT_ONCE)]
            self.outcomes.update(await asyncio.gather(*(self.expire(client, timeout_s) for timeout_s in times_s)))
            self.num_bursts += 1
            if self.num_bursts >= BURSTS_BEFORE:
                self.has_risen.set()

    async def expire(self, client: AsyncClient, timeout_s: float) -> str:
        try:
            await client.generate("A storm", ENDLESS, timeout_s=timeout_s)
        except HoldfastError as error:
            return type(error).__name__
        return "completed"


@asynccontextmanager
async def storm(cluster: ForkedCluster) -> AsyncIterator[Storm]:
    blowing = Storm()
    async with AsyncClient(cluster.addresses) as client:
        task = asyncio.create_task(blowing.blow(client))
        try:
            yield blowing
        finally:
            task.cancel()
            await asyncio.wait([task])
    assert task.cancelled(), task.exception()


async def streams_in_a_storm(cluster: ForkedCluster, fault: Fault | None, tally: Tally) -> None:
    kinds = [kind.longer(80) for kind in KINDS[:4]]
    row = tally.row(f"storm of deadlines, {fault.name}" if fault else "storm of deadlines")
    reached = asyncio.Event()

    def look(answer: Answer) -> None:
        if answer.num_tokens >= STRUCK_AT:
            reached.set()

    async with AsyncClient(cluster.addresses) as client:
        right = await asyncio.gather(*(ask(client, kind) for kind in kinds))
        async with storm(cluster) as blowing:
            await blowing.has_risen.wait()
            asking = [asyncio.create_task(ask(client, kind, look)) for kind in kinds * 2]
            first = asyncio.ensure_future(reached.wait())
            await asyncio.wait([first, *asking], return_when=asyncio.FIRST_COMPLETED)
            assert first.done(), "a stream ended before it was struck"
            if fault is not None:
                victim = await fault.choose(cluster, lambda: False)
                assert victim is not None
                struck_s = time.monotonic()
                await fault.strike(victim)
                await fault.mend(cluster, victim)
            answers = await asyncio.gather(*asking)
    if fault is not None:
        were_under_way([answer.arrivals_s for answer in answers], struck_s)
    for answer, wanted in zip(answers, right * 2, strict=True):
        row.judge(answer, wanted)
        if fault is not None:
            row.pauses_s += [pause_s for pause_s in [answer.longest_pause_after(struck_s)] if pause_s is not None]
    row.num_faults += 1
    assert row.is_clean, row.differences
    excused = {DeadlineExceededError.__name__} | ({ReplicaError.__name__} if fault else set())
    assert blowing.outcomes.keys() <= excused, blowing.outcomes
    await cluster.until_up()  # the links are there, or there again


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    making = forked_cluster(tmp_path_factory.mktemp("storm"))
    yield loop.run(making.__aenter__())
    loop.run(making.__aexit__(None, None, None))


def test_no_stream_notices(loop: asyncio.Runner, cluster: ForkedCluster, tally: Tally):
    loop.run(streams_in_a_storm(cluster, None, tally))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [KILLED_REPLICA, KILLED_ROUTER], ids=lambda fault: fault.name)
def test_no_stream_notices_a_loss(loop: asyncio.Runner, cluster: ForkedCluster, fault: Fault, tally: Tally):
    loop.run(streams_in_a_storm(cluster, fault, tally))
