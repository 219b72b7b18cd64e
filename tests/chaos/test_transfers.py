"""Blocks go from replica to replica under load: drains and roles compute nothing twice, whichever end is killed."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.llm import LLM
from holdfast.v1 import admin_pb2, admin_pb2_grpc
from holdfast.worker.sampling_params import SamplingParams
from tests import loops
from tests.chaos.command import Served, served
from tests.integration.streams import Answer, Wish, ask
from tests.parity.families import save_tiny_model

NUM_STREAMS = 6
PARAMS = SamplingParams(temperature=0.9, max_tokens=600, ignore_eos=True)
WISHES = [
    Wish(f"{seed}. " + "Once upon a time there was a fox. " * 40, replace(PARAMS, seed=seed))
    for seed in range(NUM_STREAMS)
]
TWO = ("--replicas", "2", "--routers", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A Llama of 60 M parameters and few keys and values: its blocks are always moved sooner than computed. It has the
    bundled model's tokenizer.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 2048}
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("model"), **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("demo") / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def alone(folder) -> list[list[int]]:
    with LLM(folder) as llm:
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    return [list(output.outputs[0].token_ids) for output in outputs]


async def figures(client: AsyncClient, names: Sequence[str]) -> dict[str, int]:
    """Sums over the replicas."""
    loads = (await client.get_load()).replicas
    return {name: sum(getattr(one.stats, name) for one in loads) for name in names}


RECEIVED = ("num_received_tokens", "received_bytes")


async def under(
    cluster: Served, event, wishes: Sequence[Wish] = WISHES, figures_of: Sequence[str] = RECEIVED
) -> tuple[list[Answer], dict[str, int]]:
    """What all streams were told, `event` having happened once each of them had a token; and figures afterwards."""
    started = asyncio.Semaphore(0)
    async with AsyncClient(cluster.routers[0]) as client:
        streams = [asyncio.create_task(ask(client, wish, started.release)) for wish in wishes]
        for _ in streams:
            await started.acquire()
        await event(client)
        answers = await asyncio.gather(*streams)
        return answers, await figures(client, figures_of)


def check(answers: Sequence[Answer], alone: Sequence[list[int]]) -> None:
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.token_ids for answer in answers] == list(alone)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_drained_replicas_streams_take_their_blocks_along(folder, alone):
    async def drain(client: AsyncClient) -> None:
        busiest = max((await client.get_load()).replicas, key=lambda one: one.num_running)
        async with grpc.aio.insecure_channel(cluster.routers[0]) as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(replica_id=busiest.replica_id))

    with served(folder, *TWO) as cluster:
        answers, sums = loops.run(under(cluster, drain), timeout_s=200)
    check(answers, alone)
    assert sums["num_received_tokens"] > 300


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [None, 0, -1])
def test_prompts_are_computed_by_one_replica_and_decoded_by_the_other_until_one_is_killed(folder, alone, victim):
    async def kill(client: AsyncClient) -> None:
        if victim is not None:
            cluster.named(":Replica")[victim].kill()

    with served(folder, *TWO, "--prefill-replicas", "1", "--decode-replicas", "1", "--prefill-tokens", "64") as cluster:
        answers, sums = loops.run(under(cluster, kill), timeout_s=200)
    check(answers, alone)
    assert victim is not None or sums["num_received_tokens"] > 300


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_killed_replicas_streams_go_on_with_what_it_has_put_on_the_disk(folder, alone, tmp_path):
    """Replicas of a host share the folder; blocks do not go from one to the other."""

    async def kill(client: AsyncClient) -> None:
        while sum(one.stats.num_disk_blocks for one in (await client.get_load()).replicas) < 200:
            await asyncio.sleep(0.1)
        cluster.named(":Replica")[0].kill()

    flags = (*TWO, "--no-kv-transfer", "--kv-offload-disk", f"{tmp_path},1GB")
    with served(folder, *flags) as cluster:
        answers, sums = loops.run(under(cluster, kill, figures_of=("num_disk_hit_tokens",)), timeout_s=200)
    check(answers, alone)
    assert sums["num_disk_hit_tokens"] > 300
