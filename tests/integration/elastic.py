"""A model whose replicas follow its load, on a cluster that runs: traffic at the target of its use, while it grows and
shrinks, goes to rest and wakes. Every stream is compared with what one process alone answers.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.cluster.serve import models
from holdfast.worker.config import ModelConfig, SchedulerConfig
from holdfast.worker.errors import HoldfastError
from holdfast.worker.sampling_params import SamplingParams
from tests.integration.models_at_run_time import PROMPT

NAME = "elastic"
MOST = 3
MAX_NUM_SEQS = 4
NUM_CLIENTS = round(0.7 * MOST * MAX_NUM_SEQS)
"""So many streams at a time use 70 % of what all replicas can run."""

LIMIT_S = 180.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=150, ignore_eos=True)


def config(namespace: str = "holdfast") -> HoldfastConfig:
    scaling = ScalingConfig(
        max_replicas=MOST, min_replicas=0, target_ttft_s=5.0, downscale_after_s=10.0, zero_after_s=10.0
    )
    return HoldfastConfig(
        model=ModelConfig(model="demo", served_model_name=NAME),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        cluster=ClusterConfig(namespace=namespace),
        scaling=scaling,
    )


@dataclass
class Traffic:
    """Clients that ask again and again, as many as are wanted, and what came of it."""

    routers: Sequence[str]
    right: Callable[[SamplingParams], str]
    num_wanted: int = 0
    num_whole: int = 0
    wrong: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        address = self.routers[number % len(self.routers)]
        async with AsyncClient(address) as client:
            for params in itertools.cycle((GREEDY, DRAWN)):
                while number >= self.num_wanted:
                    await asyncio.sleep(0.05)
                await self.ask(client, params)

    async def ask(self, client: AsyncClient, params: SamplingParams) -> None:
        text = ""
        try:
            async for chunk in client.stream(PROMPT, params, model=NAME):
                text += chunk.text
        except HoldfastError as error:
            self.wrong.append(f"failed after {text!r}: {error}")
            return
        self.num_whole += 1
        if text != self.right(params):
            self.wrong.append(f"changed: {text!r}")


async def until_serving(namespace: str, number: int) -> float:
    """Seconds until so many replicas of the model serve, no more and no fewer."""
    begun_s = time.monotonic()
    async with asyncio.timeout(LIMIT_S):
        while await asyncio.to_thread(num_serving, namespace) != number:
            await asyncio.sleep(0.2)
    return time.monotonic() - begun_s


def num_serving(namespace: str) -> int:
    return next(one.num_replicas for one in models.list_models(namespace) if one.name == NAME)


async def grows_and_shrinks(
    routers: Sequence[str], right: Callable[[SamplingParams], str], namespace: str = "holdfast"
) -> tuple[Traffic, dict[str, float]]:
    """1 to 3 to 1 to 0 to 1, with streams under way at every change. Returns the traffic, and how long each took."""
    traffic = Traffic(routers, right)
    clients = [asyncio.create_task(traffic.client(number)) for number in range(NUM_CLIENTS)]
    times = {}
    try:
        traffic.num_wanted = NUM_CLIENTS
        times["1 to 3"] = await until_serving(namespace, MOST)
        traffic.num_wanted = 2
        times["3 to 1"] = await until_serving(namespace, 1)
        traffic.num_wanted = 0
        times["1 to 0"] = await until_serving(namespace, 0)
        begun_s = time.monotonic()
        async with AsyncClient(routers[0]) as client:
            await traffic.ask(client, GREEDY)
        times["0 to 1, a whole answer"] = time.monotonic() - begun_s
        traffic.num_wanted = 0
    finally:
        for client_task in clients:
            client_task.cancel()
        await asyncio.wait(clients)
    return traffic, times
