"""Adapters that are refused: by every way in, with the adapter's name and the fault, and nothing changes."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from holdfast import LLM, LoRARequest
from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.commands.cli import run as command
from holdfast.worker.errors import HoldfastError
from tests import loops
from tests.chaos.forked import forked_cluster
from tests.worker.models.adapter_folders import PREFIX, save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Q = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Spoil = Callable[[Path], object]


def rewritten(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Spoil:
    return lambda folder: save_adapter(bundled_path("demo"), folder, rank=4, change=change)


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def piped(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


BAD: dict[str, Spoil] = {
    "is a pickle": pickled,
    "is no regular file": piped,
    "cut short": lambda folder: os.truncate(folder / "adapter_model.safetensors", 4000),
    "is no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "adapter_config.json cannot be read": lambda folder: (folder / "adapter_config.json").unlink(),
    "use_dora": rewritten(lambda config, tensors: config.update(use_dora=True)),
    "from 1 to 256": rewritten(lambda config, tensors: config.update(r=512)),
    "lora_alpha = 0": rewritten(lambda config, tensors: config.update(lora_alpha=0)),
    "has a NaN": rewritten(lambda config, tensors: tensors[Q].fill_(torch.nan)),
    "an adapter of another model": rewritten(lambda config, tensors: tensors.update({Q: torch.ones(4, 8)})),
    "has no lora_A": rewritten(lambda config, tensors: tensors.pop(Q)),
    "is no module of this model": rewritten(
        lambda config, tensors: (
            config["target_modules"].append("router"),
            tensors.update({Q.replace("q_proj.lora_A", f"router.lora_{part}"): torch.ones(4, 4) for part in "AB"}),
        )
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A bad one by what is said of it."""
    root, made = tmp_path_factory.mktemp("bad"), {}
    for number, (told, spoil) in enumerate(BAD.items()):
        made[told] = save_adapter(bundled_path("demo"), root / f"adapter{number}", rank=4)
        spoil(made[told])
    return made


def test_of_a_program(folders: dict[str, Path]):
    with LLM(str(bundled_path("demo")), enable_lora=True, num_threads=1) as llm:
        for number, (told, folder) in enumerate(folders.items(), 1):
            with pytest.raises(HoldfastError, match=f"adapter mine in .*{told}"):
                llm.generate("x", use_tqdm=False, lora_request=LoRARequest("mine", number, str(folder)))
        assert llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("told", ["is a pickle", "has a NaN", "lora_alpha = 0", "an adapter of another model"])
def test_at_the_start(folders: dict[str, Path], told: str, capsys: pytest.CaptureFixture[str]):
    assert command(["generate", "--lora", f"mine={folders[told]}", "--max-tokens", "1", "x"]) == 2
    said = capsys.readouterr().err
    assert "adapter mine in" in said.replace("\n", " ")
    assert told in said.replace("\n", " ")


def test_of_a_running_cluster(tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    """Over HTTP, and by the command, which is gRPC."""

    async def run() -> None:
        async with forked_cluster(tmp_path, model={"enable_lora": True}) as cluster:
            router = cluster.routers[0]
            async with httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=60) as client:
                for told, folder in folders.items():
                    body = {"lora_name": "mine", "lora_path": str(folder)}
                    answer = await client.post("/v1/load_lora_adapter", json=body)
                    assert (answer.status_code, told in answer.text) == (400, True), answer.text
                    assert "adapter mine in" in answer.text
                    await check_command(router.address, told, folder)
                listed = (await client.get("/v1/models")).json()["data"]
                assert [one["parent"] for one in listed] == [None]
                good = save_adapter(bundled_path("demo"), tmp_path / "good", rank=4)
                body = {"lora_name": "mine", "lora_path": str(good)}
                assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200

    async def check_command(address: str, told: str, folder: Path) -> None:
        line = ["models", "add-adapter", "mine", str(folder), "--server", address]
        code = await asyncio.to_thread(command, line)
        said = capsys.readouterr().err.replace("\n", " ")
        assert (code, told in said, "adapter mine in" in said) == (2, True, True), said

    loops.run(run(), timeout_s=540)
