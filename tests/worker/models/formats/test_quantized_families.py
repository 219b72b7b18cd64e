"""Every stated family in every format: what a rank reads of a quantized folder is what it reads of its numbers.

In bfloat16 and as units; quantized folders, and plain ones that are quantized while they are loaded. `make test` has
one layout and one number of ranks a family, by turns; the rest is slow.
"""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.worker.models.families import DECODERS
from tests.parity.families import NOT_SPLIT, save_tiny_model, settings_of
from tests.parity.hybrids import PATTERNS, save_hybrid
from tests.worker.models.formats import reference_rule as reference
from tests.worker.models.formats.comparison import differences_between
from tests.worker.models.formats.quantized_folders import LAYOUTS, Written, quantized

HYBRIDS = {
    "kimi_linear": "kimi",
    "lfm2": "conv, attention, conv",
    "lfm2_moe": "conv, mixture",
    "qwen3_5_text": "dense",
    "qwen3_5_moe_text": "mixture",
    "qwen3_next": "by key heads, mixture",
}
"""Families whose layers keep states, by their patterns, where the sizes below do not do."""

WIDER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
"""Every slice of a sum has whole groups, also on ranks."""

TURNS: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 16} for name in ("gpt_neox", "helium", "olmoe", "stablelm")},
    "kimi_linear": {"kv_lora_rank": 32, "linear_num_heads": 4},
    **{name: {"q_lora_rank": 32, "kv_lora_rank": 32} for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    "bamba": {"mamba_d_head": 32},
    "granitemoehybrid": {"mamba_d_head": 32, "shared_intermediate_size": 128},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 128},
    "olmo": {"clip_qkv": None},
    **{
        name: {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
}
"""What is changed of `WIDER`."""

NOT_READ: dict[str, set[int]] = {name: {2, 3, 4} for name in NOT_SPLIT & DECODERS.keys()}
"""Numbers of ranks that cannot share a family's tiny model natively."""

RANKS = (1, 2, 3, 4)
IN_TURN = (
    *("gptq act-order", "awq", "ct w4a16 asym", "ct w8a8", "fp8 block", "ct fp8", "gptq 8 bits"),
    *("fp8 whole blocks", "fp8 e5m2", "gptq g8"),
)
"""One layout of each form of codes, scales and zero points."""

AT_LOAD = ("int4", "int8", "fp8")
STACKED = ("gemma4_text", "gpt_oss", "granitemoe", "granitemoehybrid")
"""Families whose experts lie in one tensor, of which codes are not made at load."""
OTHER_NAMES = (
    "falcon_h1",
    "gpt_neox",
    "hunyuan_v1_moe",
    "kimi_linear",
    "lfm2_moe",
    "mamba2",
    "nemotron_h",
    "qwen3_next",
)
"""Families with other tensors that stay as they are, or other names of these, than llama's."""

OF_THREE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "mamba_d_ssm"), 96),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 192),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 192),
    **dict.fromkeys(("num_attention_heads", "mamba_n_heads", "mamba_num_heads", "num_heads"), 6),
    "num_key_value_heads": 3,
    "n_groups": 3,
    "linear_num_heads": 6,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}
"""Sizes that three ranks can share, where a config has them."""


@cache
def source_of(family: str, folder: Path, *, of_three: bool) -> Path:
    """A tiny model of the family."""
    own = {**settings_of(family)[1], **(PATTERNS[HYBRIDS[family]][1] if family in HYBRIDS else {})}
    changes = {**WIDER, **TURNS.get(family, {})}
    if of_three:
        heads = own.get("num_key_value_heads")
        is_latent = "kv_lora_rank" in own
        changes |= {name: value for name, value in OF_THREE.items() if name in {*own, *changes}}
        changes |= {"num_key_value_heads": heads if heads in (None, ...) else 6 if is_latent else 3}
    folder /= f"{family}-{of_three}"
    if family in HYBRIDS:
        return save_hybrid(folder, HYBRIDS[family], **{name: changes[name] for name in changes if name != "head_dim"})
    return save_tiny_model(family, folder, **changes)


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sources")


@cache
def written_of(family: str, layout: str, sources: Path, where: Path, *, of_three: bool) -> Written:
    written = quantized(source_of(family, sources, of_three=of_three), where / str(of_three), layout)
    assert written.numbers, "no linear has whole groups"
    return written


def faults(family: str, layout: str, sources: Path, where: Path, ranks: Sequence[int] = RANKS) -> list[str]:
    """What differs on any number of ranks, or is not read where it should be."""
    found: list[str] = []
    for size in ranks:
        written = written_of(family, layout, sources, where, of_three=size == 3)
        found += faults_on(family, size, written)
    return found


def faults_on(family: str, size: int, written: Written, **settings: Any) -> list[str]:
    reason, places = differences_between(written.folder, written.dequantized, size, **settings)
    found = [f"{size} ranks: {place}" for place in places]
    if (reason is None) == (size in NOT_READ.get(family, set())):
        found.append(f"{size} ranks read it" if reason is None else f"{size} ranks: {reason}")
    return found


def faults_at_load(
    family: str, quantization: str, sources: Path, where: Path, ranks: Sequence[int] = RANKS
) -> list[str]:
    """The same of a plain folder that is quantized while it is loaded."""
    found: list[str] = []
    for size in ranks:
        plain = shutil.copytree(source_of(family, sources, of_three=size == 3), where / f"{size}")
        numbers = reference.dequantized(reference.in_bfloat16(plain), quantization, where / f"{size} numbers")
        found += faults_on(family, size, Written(plain, numbers), quantization=quantization)
    return found


@pytest.mark.parametrize("family", DECODERS)
def test_a_family_in_one_format_is_its_dequantized_folder(family, sources, tmp_path):
    turn = list(DECODERS).index(family)
    ranks = RANKS[turn // len(IN_TURN) % len(RANKS)]
    assert faults(family, IN_TURN[turn % len(IN_TURN)], sources, tmp_path, [ranks]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_family_in_any_format_is_its_dequantized_folder(family, layout, sources, tmp_path):
    assert faults(family, layout, sources, tmp_path) == []


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_a_family_is_quantized_at_load(family, sources, tmp_path):
    turn = OTHER_NAMES.index(family)
    ranks = RANKS[turn % len(RANKS)]
    assert faults_at_load(family, AT_LOAD[turn % len(AT_LOAD)], sources, tmp_path, [ranks]) == []


@pytest.mark.slow
@pytest.mark.parametrize("quantization", AT_LOAD)
@pytest.mark.parametrize("family", DECODERS)
def test_any_family_is_quantized_at_load(family, quantization, sources, tmp_path):
    found = faults_at_load(family, quantization, sources, tmp_path)
    if family in STACKED:
        assert found
        assert all("has the weights of several experts, of which codes are not made at load" in one for one in found)
    else:
        assert found == []
