"""Streams of many adapters lose replicas and routers, and go on with exactly their adapter, or end by name.

The processes are real, and so are the signals. Fewer adapters are resident at a time than there are.
"""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import LLM, LoRARequest
from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from tests import loops
from tests.chaos.faults import KILLED_REPLICA, KILLED_ROUTER
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.chaos.kinds import Answer, Kind, ask
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row, Tally
from tests.worker.models.adapter_folders import save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ADAPTERS = 64
MAX_LORAS = 8
NUM_CLIENTS = 8
NUM_FAULTS = 10
LIMIT_S = 540
PROMPT = "Once upon a time there was a fox who lived in a wood near a small town, and every day the fox went out to"
"""Some blocks of the cache, the same for all adapters: what differs is theirs alone."""
PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Adapters of two sizes, by their names."""
    root, base = tmp_path_factory.mktemp("adapters"), bundled_path("demo")
    of = [{"rank": 4, "std": 0.2, "targets": ("q_proj", "v_proj", "o_proj")}, {"rank": 8, "std": 0.1}]
    return {
        f"adapter-{seed}": str(save_adapter(base, root / str(seed), seed=seed, **of[seed % 2]))
        for seed in range(NUM_ADAPTERS)
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> dict[str, list[int]]:
    """The tokens of each adapter, one request at a time, in this process."""
    with LLM(str(bundled_path("demo")), enable_lora=True, max_loras=1, num_threads=1) as llm:
        found = {}
        for number, (name, folder) in enumerate(folders.items(), 1):
            (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False, lora_request=LoRARequest(name, number, folder))
            found[name] = list(output.outputs[0].token_ids)
    assert len({tuple(one) for one in found.values()}) == len(found), "adapters that give the same tokens show nothing"
    return found


def kind_of(name: str, max_tokens: int = PARAMS.max_tokens or 0) -> Kind:
    return Kind(name=name, prompt=PROMPT, params=replace(PARAMS, max_tokens=max_tokens), options={"model": name})


def settings(folders: Mapping[str, str], max_loras: int = MAX_LORAS) -> dict[str, object]:
    return {"lora": dict(folders), "max_loras": max_loras}


async def strike_all(cluster: ForkedCluster, load: Load, row: Row) -> None:
    """One fault after the other, until each adapter was asked for under faults."""
    while row.num_faults < NUM_FAULTS or row.num_streams < 2 * NUM_ADAPTERS:
        fault = (KILLED_REPLICA, KILLED_ROUTER)[row.num_faults % 2]
        await cluster.until_up()
        await load.under_way(2)
        victim = await fault.choose(cluster, lambda: False)
        assert victim is not None
        await fault.strike(victim)
        row.num_faults += 1
        await fault.mend(cluster, victim)
        await load.judge_all(row)


def test_each_stream_has_its_own_adapter_while_replicas_and_routers_are_killed(
    tmp_path: Path, folders: dict[str, str], alone: dict[str, list[int]], tally: Tally
):
    row = tally.row(f"SIGKILLs under {NUM_ADAPTERS} adapters")

    async def run() -> list[Answer]:
        kinds = list(map(kind_of, folders))
        async with (
            forked_cluster(tmp_path, model=settings(folders)) as cluster,
            steady_load(cluster.addresses, kinds, NUM_CLIENTS, 60.0) as load,
        ):
            await strike_all(cluster, load, row)
            return list(load.right)

    right = loops.run(run(), timeout_s=LIMIT_S)
    assert {name: one.sequences[0].token_ids for name, one in zip(folders, right, strict=True)} == alone
    assert row.is_clean, row.differences
    assert (row.num_faults, row.num_streams) >= (NUM_FAULTS, 2 * NUM_ADAPTERS)


@pytest.mark.parametrize("planted", ["wrong_scale", "neighbours_row", "shared_cache"])
def test_a_planted_mistake_is_seen_in_the_tokens(
    tmp_path: Path, folders: dict[str, str], alone: dict[str, list[int]], planted: str
):
    some = dict(list(folders.items())[:4])

    async def run() -> list[Answer]:
        async with (
            forked_cluster(tmp_path, model=settings(some), planted=planted) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            return await asyncio.gather(*[ask(client, kind_of(name)) for name in some for _ in range(3)])

    answers = loops.run(run(), timeout_s=LIMIT_S)
    assert all(answer.is_whole for answer in answers)
    found = [answer.sequences[0].token_ids for answer in answers]
    assert found != [alone[name] for name in some for _ in range(3)]


@pytest.mark.parametrize("planted", ["", "stale_version"])
def test_a_stream_never_goes_on_with_another_version_of_its_adapter(
    tmp_path: Path, folders: dict[str, str], planted: str
):
    """The folder is replaced under the stream, and then its replica is killed."""
    old, new, place = folders["adapter-1"], folders["adapter-3"], tmp_path / "place"
    shutil.copytree(old, place)
    kind = kind_of("mine", 60)

    async def run() -> tuple[Answer, Answer]:
        async with (
            forked_cluster(tmp_path, model=settings({"mine": str(place)}), planted=planted) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            right = await ask(client, kind)
            return right, await ask_until_killed(cluster, client)

    async def ask_until_killed(cluster: ForkedCluster, client: AsyncClient) -> Answer:
        reached = asyncio.Event()
        asking = asyncio.create_task(ask(client, kind, lambda answer: reached.set() if answer.num_tokens > 4 else None))
        await reached.wait()
        victim = await cluster.serving_replica(asking.done)
        assert victim is not None
        shutil.rmtree(place)
        shutil.copytree(new, place)
        await KILLED_REPLICA.strike(victim)
        return await asking

    right, found = loops.run(run(), timeout_s=LIMIT_S)
    assert right.is_whole
    tokens, whole = found.sequences[0].token_ids, right.sequences[0].token_ids
    if planted:
        assert found.is_whole
        assert tokens != whole, "the other content was not seen"
    else:
        assert isinstance(found.error, InvalidRequestError)
        assert "it holds" in str(found.error)
        assert tokens == whole[: len(tokens)]
