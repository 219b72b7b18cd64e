"""A replica of a quantized model is killed under its streams, which go on elsewhere with the same tokens."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.models.quantized_folder import write_quantized
from holdfast.worker.sampling_params import SamplingParams
from tests import loops
from tests.chaos.command import Served, served
from tests.integration.streams import Answer, Wish, ask
from tests.parity.families import save_tiny_model
from tests.under_way import were_under_way
from tests.worker.models.formats.gguf_files import write_model

PARAMS = SamplingParams(temperature=0.9, max_tokens=200, ignore_eos=True)
WISHES = [Wish("Once upon a time. " * (1 + seed), replace(PARAMS, seed=seed)) for seed in range(8)]

SLOW_ENOUGH = {
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
"""For a kill to find it at work."""


def gguf_file(folder: Path) -> Path:
    """In Q4_1, but for values in Q8_0, so that queries, keys and values have several forms."""
    return write_model("llama", folder, "Q4_1", others={"attn_v": "Q8_0"}, **SLOW_ENOUGH).file


def compressed_tensors(folder: Path) -> Path:
    """W4A16, as `holdfast quantize` writes it."""
    plain = save_tiny_model("llama", folder / "plain", **SLOW_ENOUGH, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((bundled_path("demo") / name).read_bytes())
    write_quantized(plain, folder / "quantized", "int4", lambda *_: None)
    return folder / "quantized"


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
@pytest.mark.parametrize("model", [gguf_file, compressed_tensors])
def test_no_stream_notices_a_replica_that_is_killed(tmp_path, model):
    path = str(model(tmp_path))
    flags = ("--max-model-len", "1024", "--quantized-activations", "int8")
    with LLM(path, max_model_len=1024, quantized_activations="int8") as llm:
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    with served(path, "--replicas", "2", "--routers", "1", *flags) as cluster:
        answers = loops.run(kill_one(cluster), timeout_s=120)
    assert [answer.token_ids for answer in answers] == [list(output.outputs[0].token_ids) for output in outputs]
    assert all(answer.error is None for answer in answers)
