"""Replicas of models that keep states, latents or a next-token layer are killed, updated and drained under their
streams, which say what each of them says alone.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.offline.llm import LLM
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from tests import loops
from tests.chaos.command import Served, served
from tests.integration.streams import Answer, Wish, ask
from tests.parity.families import save_tiny_model
from tests.parity.harness import hugging_face
from tests.parity.hybrids import save_hybrid
from tests.parity.test_next_token import Parts, add_layer
from tests.under_way import were_under_way

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(480)]

NUM_STREAMS = 8
PARAMS = SamplingParams(temperature=0.9, max_tokens=180, ignore_eos=True)
WISHES = [Wish("Once upon a time. " * (1 + seed), replace(PARAMS, seed=seed)) for seed in range(NUM_STREAMS)]
LIMIT_S = 120
COMMON = {"vocab_size": 4096, "max_position_embeddings": 1024}
"""Of models that the bundled model's tokenizer fits."""

ALL_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SPECULATIVE = {"lfm2": "ngram", "qwen3.5": "mtp", "granite-4-h": "none", "glm-4.7-flash": "mtp"}
"""How each of the models drafts. All are slow enough for a fault to find their streams at work."""


def save(folder: Path, name: str) -> None:
    """A tiny model of a family, with a next-token layer if it is to draft by one."""
    if name == "lfm2":
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
        layers = ["conv", "conv", "full_attention"] * 4
        save_hybrid(folder, "conv, attention, conv", num_hidden_layers=12, layer_types=layers, **sizes, **COMMON)
    elif name == "qwen3.5":
        layers = ALL_LAYERS * 2
        save_hybrid(folder, "dense", hidden_size=256, num_hidden_layers=8, layer_types=layers, **COMMON)
    elif name == "granite-4-h":
        layers = ALL_LAYERS * 2
        save_hybrid(folder, "granite, mixture", num_hidden_layers=8, layer_types=layers, **COMMON)
    else:
        save_tiny_model("glm4_moe_lite", folder, hidden_size=256, num_hidden_layers=6, **COMMON)
    if SPECULATIVE[name] == "mtp":
        model = hugging_face(folder)
        is_glm = name.startswith("glm")
        add_layer(folder, Parts(model, is_glm), is_glm, model.config.num_hidden_layers)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("demo") / file, folder / file)


def changed(folder: Path, other: Path) -> Path:
    """The same model with other weights: its norms at the end are of twice the size."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    ends = ("model.norm.weight", "model.embedding_norm.weight")
    (norm,) = [name for name in ends if name in tensors]
    tensors[norm] = tensors[norm] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


Tokens = list[list[int]]


def told_alone(folder: Path) -> Tokens:
    with LLM(str(folder)) as llm:
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in SPECULATIVE:
        save(root / name, name)
    return {name: root / name for name in SPECULATIVE}


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all models. A replica has places for four sequences."""
    models: list[dict[str, Any]] = [
        {"model": {"model": str(folders[name])}, "speculation": {"speculative": how}, "replicas": 2}
        for name, how in SPECULATIVE.items()
    ]
    config = {
        "cluster": {"routers": 1, "models": models, "drain_timeout_s": LIMIT_S},
        "scheduler": {"max_num_seqs": 4},
    }
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(json.dumps(config))
    with served("--config", str(path)) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=SPECULATIVE)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def alone(name: str, folders: dict[str, Path]) -> Tokens:
    return told_alone(folders[name])


def command(cluster: Served, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`holdfast ...` for the cluster."""
    found = [sys.executable, "-m", "holdfast", *arguments, "--server", cluster.routers[0]]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(found, capture_output=True, text=True, timeout=LIMIT_S, env=environ)


def replicas_of(cluster: Served, name: str) -> list[psutil.Process]:
    return [one for one in cluster.named(":Replica") if f":{name}:" in " ".join(one.cmdline())]


async def streamed(cluster: Served, model: str, act: Callable[[], object]) -> tuple[list[Answer], float]:
    """What all streams were told, every other one urgent, while `act` ran on a thread; and when it began."""
    started = asyncio.Semaphore(0)
    urgencies = (Priority.LOW, Priority.HIGH)
    async with AsyncClient(cluster.routers[0]) as client:
        streams = [
            asyncio.create_task(ask(client, wish, started.release, model=model, priority=urgencies[number % 2]))
            for number, wish in enumerate(WISHES)
        ]
        for _ in streams:
            await started.acquire()
        acted_s = time.monotonic()
        acting = asyncio.create_task(asyncio.to_thread(act))
        answers = await asyncio.gather(*streams)
        await acting
    return answers, acted_s


def tokens_of(answers: list[Answer]) -> Tokens:
    assert all(answer.error is None for answer in answers), [answer.error for answer in answers]
    return [answer.token_ids for answer in answers]


async def until_whole(cluster: Served, model: str) -> None:
    """Until both replicas serve."""
    async with AsyncClient(cluster.routers[0]) as client, asyncio.timeout(LIMIT_S):
        while True:
            replicas = [one for one in (await client.get_load()).replicas if one.model == model]
            if len(replicas) == 2:
                return
            await asyncio.sleep(0.1)


def test_no_stream_notices_a_replica_that_is_killed(cluster: Served, name: str, alone: Tokens):
    """The other one has places for half of the streams; the others wait for them."""
    answers, killed_s = loops.run(streamed(cluster, name, replicas_of(cluster, name)[0].kill), timeout_s=LIMIT_S)
    were_under_way([answer.arrivals_s for answer in answers], killed_s, at_least=2)
    assert tokens_of(answers) == alone
    loops.run(until_whole(cluster, name), timeout_s=LIMIT_S)


def test_streams_of_an_updated_model_are_of_one_version(
    cluster: Served, name: str, alone: Tokens, folders: dict[str, Path], tmp_path: Path
):
    """Streams that are open when the command begins are of the old weights to their ends, later ones of the new."""
    other = changed(folders[name], tmp_path / "changed")
    said: list[subprocess.CompletedProcess[str]] = []
    answers, began_s = loops.run(
        streamed(cluster, name, lambda: said.append(command(cluster, "models", "update", name, "--model", str(other)))),
        timeout_s=LIMIT_S,
    )
    assert said[0].returncode == 0, said[0].stderr
    were_under_way([answer.arrivals_s for answer in answers], began_s, at_least=2)
    assert tokens_of(answers) == alone
    later, _ = loops.run(streamed(cluster, name, lambda: None), timeout_s=LIMIT_S)
    assert tokens_of(later) == told_alone(other) != alone


def test_streams_of_a_removed_model_end_as_they_would_have(cluster: Served, name: str, tmp_path: Path):
    before, _ = loops.run(streamed(cluster, name, lambda: None), timeout_s=LIMIT_S)
    said: list[subprocess.CompletedProcess[str]] = []
    answers, began_s = loops.run(
        streamed(cluster, name, lambda: said.append(command(cluster, "models", "remove", name))), timeout_s=LIMIT_S
    )
    assert said[0].returncode == 0, said[0].stderr
    were_under_way([answer.arrivals_s for answer in answers], began_s, at_least=2)
    assert tokens_of(answers) == tokens_of(before)
