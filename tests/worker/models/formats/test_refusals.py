"""Quantized folders that cannot be served are refused by name, before anything is loaded where config.json tells."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.model_files import check_files
from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.formats.quantization_scheme import read_scheme
from holdfast.worker.models.model import build_tree
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.weight_files import weight_bytes
from holdfast.worker.models.weights import read_config
from tests.fake_group import run_ranks
from tests.worker.models.formats.comparison import differences_on
from tests.worker.models.formats.quantized_folders import (
    AWQ,
    FP8,
    Tensors,
    Written,
    ct_config,
    gptq_config,
    set_config,
    write,
    write_gpt_oss,
)

CT = ct_config(4, "group", "pack-quantized")
NAME = "model.layers.0.mlp.down_proj"

SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "hqq": ({"quant_method": "hqq"}, "hqq"),
    "no method": ({"bits": 4}, "unnamed"),
    "no mapping": (["gptq"], "gptq"),
    "an empty list": ([], "[]"),
    "gptq, 3 bits": (gptq_config(bits=3), "bits = '3'"),
    "gptq, bits as a flag": (gptq_config(bits=True), "bits = 'True'"),
    "gptq, no groups": (gptq_config(group_size=None), "group_size"),
    "gptq, marlin": (gptq_config(checkpoint_format="marlin"), "marlin"),
    "gptq, a pattern": (gptq_config(dynamic={"+:(": {"bits": 8}}), "not a regular expression"),
    "awq, gemv": ({**AWQ, "version": "GEMV"}, "gemv"),
    "awq, 8 bits": ({**AWQ, "bits": 8}, "bits = '8'"),
    "fp8, blocks": ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
    "sparse": ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "transforms": ({**CT, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    "not compressed": ({**CT, "quantization_status": "frozen"}, "frozen"),
    "nvfp4": ({**CT, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    "no config_groups": ({**CT, "config_groups": {}}, "config_groups"),
    "ct, 5 bits": (ct_config(5, "group", "pack-quantized"), "num_bits = '5'"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_that_is_not_read(name):
    config, word = SCHEMES[name]
    with pytest.raises(UnsupportedModelError) as caught:
        read_scheme({"model_type": "llama", "quantization_config": config})
    assert "its " in str(caught.value)
    assert "quanti" in str(caught.value)
    assert word in str(caught.value)
    assert "Serve the checkpoint that is not quantized" in str(caught.value)


def test_a_scheme_that_is_not_read_is_refused_before_anything_starts(tmp_path):
    written = write("llama", tmp_path, "gptq")
    (written.folder / "tokenizer.json").write_text("{}")
    config = HoldfastConfig.model_validate({"model": {"model": str(written.folder)}})
    check_files(config)
    set_config(written.folder, quantization_config={"quant_method": "quip"})
    with pytest.raises(UnsupportedModelError, match="quip"):
        check_files(config)


def test_names_of_modules():
    scheme = read_scheme({"quantization_config": {**CT, "ignore": ["lm_head", "re:.*\\.gate$", "vision"]}})
    assert scheme is not None
    assert scheme.of("model.layers.3.mlp.up_proj") is not None
    for module in ("lm_head", "model.layers.3.mlp.gate", "model.vision.layers.3.mlp.up_proj", "model.embed_tokens"):
        assert scheme.of(module) is None
    dynamic = {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8, "group_size": 16}}
    scheme = read_scheme({"quantization_config": gptq_config(dynamic=dynamic)})
    assert scheme is not None
    assert scheme.of("a.down_proj") is None
    up, other = scheme.of("a.up_proj"), scheme.of("a.gate_proj")
    assert up is not None
    assert other is not None
    assert (up.bits, up.block, other.bits, other.block) == (8, (1, 16), 4, (1, 32))


def loading_fails(folder: Path) -> str:
    """What the way that reads every family says."""

    def build(group: Any) -> str:
        config, cpu = read_config(folder), torch.device("cpu")
        target = Target(group=group, device=cpu, dtype=torch.bfloat16)
        with pytest.raises((ConfigurationError, UnsupportedModelError)) as caught:
            build_tree(ModelConfig(model=str(folder)), folder, config, target, lambda *_: None)
        return str(caught.value)

    return run_ranks(1, build)[0]


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write("llama", tmp_path_factory.mktemp("awq"), "awq")


def changed(written: Written, folder: Path, change: Any) -> Path:
    """A copy with other tensors."""
    copy = Written(shutil.copytree(written.folder, folder / "model"), written.dequantized)
    return copy.change(change).folder


@pytest.mark.parametrize("part", ["scales", "qzeros", "qweight"])
def test_a_tensor_that_is_missing(awq, tmp_path, part):
    def drop(tensors: Tensors) -> None:
        del tensors[f"{NAME}.{part}"]

    message = loading_fails(changed(awq, tmp_path, drop))
    assert f"model.safetensors lacks the tensor {NAME}.{part}" in message


@pytest.mark.parametrize("part", ["scales", "qzeros", "qweight"])
def test_a_tensor_of_another_shape(awq, tmp_path, part):
    def cut(tensors: Tensors) -> None:
        tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"][:-1].contiguous()

    message = loading_fails(changed(awq, tmp_path, cut))
    assert f"model.safetensors: the tensor {NAME}.{part} has shape" in message


def test_a_tensor_of_another_type(awq, tmp_path):
    def convert(tensors: Tensors) -> None:
        tensors[f"{NAME}.qweight"] = tensors[f"{NAME}.qweight"].long()

    assert f"the tensor {NAME}.qweight is of type int64, and not int32" in loading_fails(
        changed(awq, tmp_path, convert)
    )


def test_a_module_that_is_not_to_be_quantized(awq, tmp_path):
    folder = changed(awq, tmp_path, lambda tensors: None)
    set_config(folder, quantization_config={**AWQ, "modules_to_not_convert": ["mlp.down_proj"]})
    message = loading_fails(folder)
    assert f"{NAME}.qweight is quantized, and is not to be" in message


def test_bits_that_are_not_those_of_the_file(tmp_path):
    written = write("llama", tmp_path, "gptq")
    set_config(written.folder, quantization_config=gptq_config(bits=8))
    assert "qweight has shape" in loading_fails(written.folder)
    set_config(written.folder, quantization_config=gptq_config(group_size=64))
    assert "scales has shape" in loading_fails(written.folder)


def test_groups_that_are_not_there(tmp_path):
    def move(tensors: Tensors) -> None:
        tensors[f"{NAME}.g_idx"][5] = 3

    written = write("llama", tmp_path, "gptq act-order").change(move)
    assert f"{NAME}.g_idx names groups 0 to 3, of 3" in loading_fails(written.folder)


def test_a_tensor_too_many_but_a_bias_of_zeros(tmp_path):
    def add(tensors: Tensors) -> None:
        tensors[f"{NAME}.bias"] = torch.zeros(64, dtype=torch.float16)
        tensors["model.layers.0.mlp.more"] = torch.zeros(3)

    message = loading_fails(write("llama", tmp_path, "gptq").change(add).folder)
    assert "unexpected 1 weights (model.layers.0.mlp.more)" in message


def test_a_head_that_is_the_table_once_more(tmp_path):
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"][3, 4] += 1

    written = write("qwen2", tmp_path, "gptq", tie_word_embeddings=True).change(add)
    assert differences_on(written, 1) == []
    assert "unexpected 1 weights (lm_head.weight)" in loading_fails(written.change(change).folder)


def test_experts_without_scales(tmp_path):
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def drop(tensors: Tensors) -> None:
        del tensors[name]

    message = loading_fails(write_gpt_oss(tmp_path).change(drop).folder)
    assert f"lacks the tensor {name}" in message


@pytest.mark.parametrize(
    ("layout", "part"),
    [("gptq", "scales"), ("awq", "scales"), ("ct w4a16", "weight_scale"), ("fp8 block", "weight_scale_inv")],
)
def test_scales_that_were_never_written(tmp_path, layout, part):
    written = write("llama", tmp_path, layout).change(lambda tensors: tensors[f"{NAME}.{part}"].zero_())
    assert f"model.safetensors: the tensor {NAME}.{part} is zero everywhere" in loading_fails(written.folder)


def test_a_tensor_in_two_files(tmp_path):
    folder = write("llama", tmp_path, "awq").folder
    (folder / "tokenizer.json").write_text("{}")
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    config = HoldfastConfig.model_validate({"model": {"model": str(folder)}})
    with pytest.raises(
        ConfigurationError, match=r"the tensor .* is in model\.safetensors and in more\.safetensors; rem"
    ):
        check_files(config)


def test_groups_that_do_not_divide_the_inputs(tmp_path):
    """As many groups of 33 would be there as of 32."""
    written = write("llama", tmp_path, "awq")
    set_config(written.folder, quantization_config={**AWQ, "group_size": 33})
    assert "belongs to 96 inputs, which groups of 33 do not divide" in loading_fails(written.folder)


@pytest.mark.parametrize("layout", ["gptq 8 bits", "awq", "ct w4a16 asym", "ct w8a8", "fp8 block"])
def test_memory_is_that_of_the_dequantized_folder(tmp_path, layout):
    written = write("llama", tmp_path, layout)
    assert weight_bytes(written.folder) == weight_bytes(written.dequantized)
    assert weight_bytes(written.folder, "float32") == weight_bytes(written.dequantized, "float32")


def test_any_config_is_read_or_refused():
    """Each value of a good one replaced by something else."""
    for good in (CT, AWQ, FP8, gptq_config()):
        for key in good:
            for value in (None, 0, -3, 2.5, "x", [], {}, [1], {"a": 1}, True):
                config = json.loads(json.dumps({"quantization_config": {**good, key: value}}))
                with suppress(UnsupportedModelError):
                    read_scheme(config)
