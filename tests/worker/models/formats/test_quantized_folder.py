"""Folders that `holdfast quantize` writes: read as the checkpoint is with --quantization."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.checkpoint_scheme import quantization_of
from holdfast.worker.models.quantized_folder import QUANTIZATION_OF, write_quantized
from holdfast.worker.models.weight_files import INDEX
from tests.parity.families import save_tiny_model
from tests.worker.models.formats import reference_rule as reference
from tests.worker.models.formats.quantized_folders import SIZES
from tests.worker.models.layouts import differences_of

WORDS = {
    "int4": "compressed-tensors W4A16 g32 + W8A16 per channel",
    "int8": "compressed-tensors W8A8 per channel",
    "fp8": "compressed-tensors W8A8 fp8 per channel",
    "w8a16": "compressed-tensors W8A16 per channel",
}


def silent(phase: str, done: int, total: int) -> None:
    pass


def plain(where: Path, family: str = "llama", **changes: object) -> Path:
    return reference.in_bfloat16(save_tiny_model(family, where, **{**SIZES, **changes}))


def differences_on(out: Path, numbers: Path, size: int) -> list[str]:
    return differences_of(out, numbers, size)


@pytest.mark.parametrize("scheme", QUANTIZATION_OF)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_a_written_folder_is_the_dequantized_one(tmp_path, family, scheme):
    source = plain(tmp_path / "plain", family, tie_word_embeddings=family == "qwen2")
    write_quantized(source, tmp_path / "out", scheme, silent)
    numbers = reference.dequantized(source, QUANTIZATION_OF[scheme], tmp_path / "numbers")
    assert quantization_of(tmp_path / "out") == WORDS[scheme]
    assert [differences_on(tmp_path / "out", numbers, size) for size in (1, 2)] == [[], []]


@pytest.mark.parametrize("scheme", QUANTIZATION_OF)
def test_the_package_of_compressed_tensors_reads_the_same(tmp_path, scheme):
    package = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    source = plain(tmp_path / "plain")
    write_quantized(source, tmp_path / "out", scheme, silent)
    numbers = load_file(
        reference.dequantized(source, QUANTIZATION_OF[scheme], tmp_path / "numbers") / "model.safetensors"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert schemes.QuantizationConfig.model_validate(config).format == config["format"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    compressor = package.BaseCompressor.get_value_from_registry(config["format"])
    groups = config["config_groups"]
    for module in ("model.layers.0.mlp.down_proj", "lm_head"):
        parts = {name.rpartition(".")[2]: one for name, one in stored.items() if name.startswith(f"{module}.")}
        own = next((group for group in groups.values() if module in group["targets"]), groups["group_0"])
        found = compressor.decompress(parts, schemes.QuantizationScheme(**own))["weight"]
        assert found.bfloat16().equal(numbers[f"{module}.weight"])


def test_config_says_which_modules_are_how(tmp_path):
    source = plain(tmp_path / "plain", "mixtral", intermediate_size=40)
    write_quantized(source, tmp_path / "out", "int4", silent)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    first, second = said["config_groups"].values()
    assert first["targets"] == ["Linear"]
    assert (first["weights"]["num_bits"], first["weights"]["group_size"]) == (4, 32)
    experts = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2" for expert in range(4)]
    assert set(second["targets"]) >= {"lm_head", experts[0]}
    assert said["ignore"] == ["model.layers.0.block_sparse_moe.gate"]
    assert second["weights"]["num_bits"] == 8


def test_several_files_have_an_index(tmp_path):
    source = plain(tmp_path / "plain")
    write_quantized(source, tmp_path / "out", "int8", silent, shard_bytes=10_000)
    numbers = reference.dequantized(source, "int8", tmp_path / "numbers")
    places = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert len(set(places.values())) > 2
    assert differences_on(tmp_path / "out", numbers, 1) == []


def test_it_appears_as_a_whole_or_not_at_all(tmp_path):
    source = plain(tmp_path / "plain")
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "made" / "out"
    done = []
    write_quantized(source, out, "int4", lambda phase, number, total: done.append((number, total, out.exists())))
    assert done[-1][0] == done[-1][1]
    assert not any(is_there for *_, is_there in done)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(ConfigurationError, match=r"^OUT = .*: it is there already"):
        write_quantized(source, out, "int4", silent)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][1, 1] = torch.inf
    reference.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"self_attn.v_proj.weight has numbers .* at \[1, 1\] in "):
        write_quantized(source, out.with_name("other"), "int4", silent)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_is_quantized_is_not_quantized_again(tmp_path):
    source = plain(tmp_path / "plain")
    write_quantized(source, tmp_path / "out", "fp8", silent)
    with pytest.raises(ConfigurationError, match="is quantized already"):
        write_quantized(tmp_path / "out", tmp_path / "again", "int4", silent)


FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""What vLLM makes one linear of, and its name."""

CLASSES = {"qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear", "lm_head": "ParallelLMHead"}


def group_in_vllm(module: str, groups: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """By vLLM's rules (`compressed_tensors/utils.py`, as of November 2026): a target that is the module's own name, or
    else is a part of the name of its class. What a file's tensors are loaded into has the name of the fused linear.
    """
    prefix, _, own = module.rpartition(".")
    name = f"{prefix}.{FUSED[own]}" if own in FUSED else module
    of_class = CLASSES.get(name.rpartition(".")[2], "RowParallelLinear").lower()
    targets = [(target, group) for group in groups.values() for target in group["targets"]]
    by_name = [group for target, group in targets if target == name]
    return (by_name or [group for target, group in targets if target.lower() in of_class])[0]


@pytest.mark.parametrize("scheme", QUANTIZATION_OF)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_are_those_that_vllm_makes_room_for(tmp_path, family, scheme):
    """Names, types and shapes of its schemes WNA16, W8A8 int8 and W8A8 fp8. It was not run."""
    source = plain(tmp_path / "plain", family, tie_word_embeddings=family == "qwen2")
    write_quantized(source, tmp_path / "out", scheme, silent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config["quantization_config"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: one.shape for name, one in load_file(source / "model.safetensors").items()}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    modules = {name.rpartition(".")[0] for name in stored if name.endswith("weight_scale")}
    assert len(modules) == 7 * config["num_hidden_layers"] + 1
    for module in modules:
        group = group_in_vllm(module, said["config_groups"])
        outputs, inputs = shapes[f"{module}.weight"]
        bits, size = group["weights"]["num_bits"], group["weights"]["group_size"]
        parts = {name.rpartition(".")[2]: one for name, one in stored.items() if name.rpartition(".")[0] == module}
        parts.pop("bias", None)
        kinds = {part: (one.dtype, tuple(one.shape)) for part, one in parts.items()}
        scales = (torch.bfloat16, (outputs, inputs // size if size else 1))
        if said["format"] == "pack-quantized":
            packed = (torch.int32, (outputs, inputs * bits // 32))
            assert kinds == {"weight_packed": packed, "weight_scale": scales, "weight_shape": (torch.int64, (2,))}
            assert parts["weight_shape"].tolist() == [outputs, inputs]
            assert group["input_activations"] is None
        else:
            codes = torch.float8_e4m3fn if scheme == "fp8" else torch.int8
            assert kinds == {"weight": (codes, (outputs, inputs)), "weight_scale": scales}
            assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
        assert group["weights"]["symmetric"]
        assert not group["weights"]["dynamic"]
