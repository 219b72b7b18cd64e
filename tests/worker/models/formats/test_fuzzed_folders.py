"""Quantized folders that are cut short, tampered with or mislabelled, by a fixed seed: each is loaded, or refused in
words that name what is wrong. No crash, no other exception, and nothing that goes on for long.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.errors import HoldfastError
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.loading import load_model
from tests.examples import examples
from tests.worker.models.formats.quantized_folders import LAYOUTS, Tensors, save, set_config, write, write_gpt_oss

pytestmark = pytest.mark.slow

CHOSEN = ("gptq act-order", "gptq 8 bits", "awq", "ct w4a16 asym", "ct w8a8", "fp8 block")
NAMED = (
    "model.safetensors",
    "config.json",
    "model.",
    "lm_head",
    "quantization_config",
    "weights",
    "group",
    "bits",
    "heads",
)
"""Words of which an error has at least one: a file, a tensor, or an entry of config.json."""


def cut(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(["model.safetensors", "model.safetensors", "config.json"])
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def tamper_with_header(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(bytes(content))


def tamper_with_numbers(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    for _ in range(50):
        content[rng.randrange(8 + int.from_bytes(content[:8], "little"), len(content))] = rng.choice([0, 0x7F, 0xFF])
    path.write_bytes(bytes(content))


def label_otherwise(folder: Path, rng: random.Random) -> None:
    set_config(folder, quantization_config=LAYOUTS[rng.choice(list(LAYOUTS))][1])


def change_an_entry(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    part: dict[str, Any] = config["quantization_config"]
    while nested := [value for value in part.values() if isinstance(value, dict) and value and rng.random() < 0.7]:
        part = nested[0]
    part[rng.choice(list(part))] = rng.choice([4, 8, 16, 64, -1, 0, True, None, "group", [1, 2], {}])
    set_config(folder, quantization_config=config["quantization_config"])


def _changed(folder: Path, change: Callable[[Tensors, str], None], rng: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors, rng.choice([name for name in tensors if "layers.0" in name]))
    save(folder, tensors)


def drop_a_tensor(folder: Path, rng: random.Random) -> None:
    _changed(folder, dict.__delitem__, rng)


def rename_a_tensor(folder: Path, rng: random.Random) -> None:
    end = rng.choice(["weight", "qweight", "scales", "weight_packed", "weight_scale", "bias", "g_idx", "odd"])
    _changed(folder, lambda tensors, name: tensors.update({f"{name.rpartition('.')[0]}.{end}": tensors.pop(name)}), rng)


def reshape_a_tensor(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, name: str) -> None:
        one = tensors[name]
        tensors[name] = rng.choice(
            [one[:-1], one.flatten(), one[None], one.T if one.dim() == 2 else one[:1]]
        ).contiguous()

    _changed(folder, change, rng)


def retype_a_tensor(folder: Path, rng: random.Random) -> None:
    dtype = rng.choice([torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
    _changed(folder, lambda tensors, name: tensors.update({name: tensors[name].to(dtype)}), rng)


CHANGES = (
    cut,
    tamper_with_header,
    tamper_with_numbers,
    label_otherwise,
    change_an_entry,
    drop_a_tensor,
    rename_a_tensor,
    reshape_a_tensor,
    retype_a_tensor,
)


def refusal(folder: Path) -> str | None:
    """What the load of a folder says against it; None: it is loaded."""
    config = WorkerConfig(
        model=ModelConfig(model=str(folder), device="cpu", max_model_len=64),
        cache=CacheConfig(num_blocks=8, block_size=16),
    )
    try:
        load_model(config, SingleRank(), torch.device("cpu"), lambda *_: None).backend.close()
    except HoldfastError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("folders")
    made = {layout: write("llama", where / str(number), layout).folder for number, layout in enumerate(CHOSEN)}
    return made | {"mxfp4": write_gpt_oss(where / "mxfp4").folder}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_damaged_folder_is_loaded_or_refused_in_words(folders, tmp_path, change):
    for layout, folder in folders.items():
        for seed in range(examples(2)):
            copy = shutil.copytree(folder, tmp_path / f"{layout} {seed}".replace(" ", "-"))
            change(copy, random.Random(f"{layout} {change.__name__} {seed}"))
            told = refusal(copy)
            assert told is None or any(word in told for word in NAMED), (layout, seed, told)
            shutil.rmtree(copy)


def test_what_is_whole_is_loaded(folders):
    assert [layout for layout, folder in folders.items() if refusal(folder) is not None] == []
