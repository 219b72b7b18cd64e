"""Quantization schemes in words, one for each kind of checkpoint."""

import json

import pytest

from holdfast.worker.models.checkpoint_scheme import quantization_of
from holdfast.worker.models.formats.quantization_rule import words_of
from holdfast.worker.models.formats.quantization_scheme import read_scheme
from tests.worker.models.formats.quantized_folders import FP8, LAYOUTS

LINEARS = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
HEAD = {"targets": ["re:.*lm_head$"], "weights": {"num_bits": 8, "strategy": "channel"}}
MIXED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": LINEARS, "b": HEAD}}

SAID = {
    "gptq act-order": "GPTQ int4 g32",
    "gptq 8 bits": "GPTQ int8 g32",
    "gptq one group": "GPTQ int4 per channel",
    "awq": "AWQ int4 g32",
    "ct w4a16": "compressed-tensors W4A16 g32",
    "ct w4a16 asym": "compressed-tensors W4A16 g32 asymmetric",
    "ct w8a16": "compressed-tensors W8A8 per channel",  # whose activations the config of the test has at 8 bits
    "ct w8a8 tensor": "compressed-tensors W8A8 per tensor",
    "ct fp8": "compressed-tensors W8A8 fp8 per channel",
    "ct fp8 block": "compressed-tensors W8A8 fp8 block 24x20",
    "fp8 block": "fp8 block 24x20",
    "fp8 tensor": "fp8 per tensor",
}


@pytest.mark.parametrize("layout", SAID)
def test_a_scheme_is_said_by_its_bits_and_what_shares_a_scale(layout):
    _, config = LAYOUTS[layout]
    assert words_of(read_scheme({"model_type": "llama", "quantization_config": config})) == SAID[layout]


def test_several_groups_are_said_one_after_the_other():
    words = words_of(read_scheme({"quantization_config": MIXED}))
    assert words == "compressed-tensors W4A16 g32 + W8A16 per channel"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "none"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {**FP8, "weight_block_size": [128, 128]}}, "fp8 block 128x128"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "none"),  # which a gate refuses
    ],
)
def test_a_folder_says_it_by_its_config(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert quantization_of(tmp_path) == words
