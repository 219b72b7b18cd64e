"""A program: a Ray cluster of two nodes with a replica on each, streams on both, and one node that is lost.

Run by `test_node_loss.py` in a process of its own, because a process can only ever be part of one Ray. Prints what came
of it as JSON.
"""

import asyncio
import json
import os
from dataclasses import asdict, dataclass

from cluster.client import AsyncClient
from cluster.config import ClusterConfig, HoldfastConfig
from cluster.serving import serving
from worker.config import ParallelConfig
from worker.sampling_params import SamplingParams

NUM_STREAMS = 8
MAX_TOKENS = 300


@dataclass(frozen=True)
class Outcome:
    num_busy_before: int
    """Replicas that had streams when the node was lost."""
    num_replicas_after: int
    num_equal: int
    """Streams that came out as they had before the fault."""


async def stream(client: AsyncClient, number: int, started: asyncio.Event) -> list[int]:
    token_ids: list[int] = []
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True)
    async for chunk in client.stream("Monday, Tuesday,", params):
        token_ids += chunk.token_ids
        started.set()
    return token_ids


async def lose_a_node(addresses, cluster, node) -> Outcome:
    async with AsyncClient(addresses) as client:
        right = [await stream(client, number, asyncio.Event()) for number in range(NUM_STREAMS)]
        started = [asyncio.Event() for _ in right]
        streams = [asyncio.create_task(stream(client, number, event)) for number, event in enumerate(started)]
        await asyncio.gather(*(event.wait() for event in started))
        busy = [replica for replica in (await client.get_load()).replicas if replica.num_running > 0]
        await asyncio.to_thread(cluster.remove_node, node, False)
        answers = await asyncio.gather(*streams)
        left = (await client.list_models()).models[0].num_replicas
        return Outcome(
            len(busy), left, sum(answer == expected for answer, expected in zip(answers, right, strict=True))
        )


def main() -> None:
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **memory})
    node = cluster.add_node(num_cpus=1, **memory)  # two routers and one replica fit on the first node, one more here
    cluster.wait_for_nodes()
    config = HoldfastConfig(
        cluster=ClusterConfig(address=cluster.address, replicas=2, port=0, host="127.0.0.1", drain_timeout_s=2.0),
        parallel=ParallelConfig(num_threads=1),
    )
    try:
        with serving(config, lambda *_: None) as up:
            print(json.dumps(asdict(asyncio.run(lose_a_node(up.routers, cluster, node)))), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
