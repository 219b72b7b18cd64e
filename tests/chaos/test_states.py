"""A replica of a model that keeps states is killed under its streams, which go on elsewhere with the same tokens."""

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.sampling_params import SamplingParams
from tests import loops
from tests.chaos.command import Served, served
from tests.integration.streams import Answer, Wish, ask
from tests.parity.hybrids import save_hybrid
from tests.under_way import were_under_way

NUM_STREAMS = 8
PARAMS = SamplingParams(temperature=0.9, max_tokens=250, ignore_eos=True)
WISHES = [Wish("Once upon a time. " * (1 + seed), replace(PARAMS, seed=seed)) for seed in range(NUM_STREAMS)]


def served_hybrid(folder: Path) -> Path:
    """A tiny LFM2, slow enough for a kill to find it at work, with the bundled model's tokenizer."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4}
    layers = ["conv", "conv", "full_attention"] * 4
    save_hybrid(
        folder, "conv, attention, conv", **sizes, layer_types=layers, vocab_size=4096, max_position_embeddings=1024
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("demo") / name, folder / name)
    return folder


async def kill_one(cluster: Served) -> list[Answer]:
    """What all streams were told, one of whose replicas was killed once each of them had a token."""
    started = asyncio.Semaphore(0)
    async with AsyncClient(cluster.routers[0]) as client:
        streams = [asyncio.create_task(ask(client, wish, started.release)) for wish in WISHES]
        for _ in streams:
            await started.acquire()
        killed_s = time.monotonic()
        cluster.named(":Replica")[0].kill()
        answers = await asyncio.gather(*streams)
    were_under_way([answer.arrivals_s for answer in answers], killed_s, at_least=2)
    return answers


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_no_stream_notices_a_replica_that_is_killed(tmp_path):
    folder = str(served_hybrid(tmp_path / "hybrid"))
    with LLM(folder) as llm:
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    with served(folder, "--replicas", "2", "--routers", "1", "--speculative", "ngram") as cluster:
        answers = loops.run(kill_one(cluster), timeout_s=120)
    assert [answer.token_ids for answer in answers] == [list(output.outputs[0].token_ids) for output in outputs]
    assert all(answer.error is None for answer in answers)
