"""SmolLM2 from its GGUF file on a cluster whose replica is killed under its streams."""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Iterator

import httpx2
import pytest

from holdfast import LLM, SamplingParams
from holdfast.cluster.bundled_model.bundled_model import packaged_path
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.commands.cli import run
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.serving import serving
from holdfast.worker.config import ModelConfig, ParallelConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.process_memory import readable_bytes
from tests.integration.processes import processes_named, two_free_ports
from tests.integration.streams import Answer, Wish, ask
from tests.under_way import were_under_way

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPTS = ("The capital of France is", "Once upon a time", "The three primary colours are", "Water boils")
WISHES = [
    Wish(prompt, SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=120, ignore_eos=True))
    for number, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    try:
        packaged_path()
    except ConfigurationError as error:
        pytest.skip(str(error))
    with LLM("smollm2", max_model_len=512, num_threads=1) as llm:
        outputs = llm.generate([wish.prompt for wish in WISHES], [wish.params for wish in WISHES])
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def cluster(expected) -> Iterator[tuple[str, str]]:
    """Addresses of a router: gRPC, HTTP."""
    http_port = two_free_ports()
    config = HoldfastConfig(
        model=ModelConfig(model="smollm2", max_model_len=512),
        cluster=ClusterConfig(replicas=2, port=two_free_ports(), engine_port=0, http_port=http_port),
        parallel=ParallelConfig(num_threads=1),
    )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with progress(sys.stderr) as report, serving(config, report) as started:
        yield started.routers[0], f"http://127.0.0.1:{http_port}"
    signal.signal(signal.SIGTERM, on_sigterm)


def test_every_place_says_how_its_weights_are_quantized_and_what_memory_they_take(cluster, capsys):
    address, http = cluster

    async def listed() -> tuple[str, int]:
        async with AsyncClient(address) as client:
            (model,) = (await client.list_models()).models
            return model.quantization, model.weight_bytes

    scheme, num_bytes = asyncio.run(listed())
    assert scheme == "GGUF Q4_1"
    assert 90 << 20 < num_bytes < 96 << 20
    for path, key in (("/v1/models", "data"), ("/cluster", "models")):
        (model,) = httpx2.get(http + path).json()[key]
        assert (model["quantization"], model["weight_bytes"]) == (scheme, num_bytes), path
    metric = f'holdfast_model_weight_bytes{{model="smollm2",quantization="{scheme}"}} '
    (value,) = re.findall(f"^{re.escape(metric)}(.*)$", httpx2.get(f"{http}/metrics").text, re.MULTILINE)
    assert float(value) == num_bytes
    memory = readable_bytes(num_bytes)
    for command in (
        ["status", "--server", address],
        ["estimate", "smollm2"],
        ["doctor", "--quick", "--model", "smollm2"],
    ):
        run(command)
        shown = " ".join(capsys.readouterr().out.split())
        assert scheme in shown, command
        assert memory in shown, command


def test_streams_go_on_with_the_same_tokens_when_a_replica_is_killed(cluster, expected):
    answers = asyncio.run(_killed_under(cluster[0]))
    assert [answer.error for answer in answers] == [None] * len(WISHES)
    assert [answer.token_ids for answer in answers] == expected


async def _killed_under(address: str) -> list[Answer]:
    """The answers to streams that were under way when a replica was killed."""
    started = asyncio.Semaphore(0)
    async with AsyncClient(address) as client:
        assert [model.name for model in (await client.list_models()).models] == ["smollm2"]
        streams = [asyncio.create_task(ask(client, wish, started.release)) for wish in WISHES]
        for _ in WISHES:
            await started.acquire()
        struck_s = time.monotonic()
        processes_named("smollm2:Replica")[0].kill()
        answers = await asyncio.gather(*streams)
    were_under_way([answer.arrivals_s for answer in answers], struck_s, at_least=len(WISHES) // 2)
    return answers
