"""Layers of real width, as one rank of published models has them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.worker.executors.layout import DecoderLayout, LatentAttention, attention_of
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.native_backend import _Provable
from holdfast.worker.models.proof import NUM_TOKENS
from holdfast.worker.models.reference import Reference
from tests.fake_group import FakeGroup, _Meeting
from tests.worker.executors.cpu.test_delta_net import Runner
from tests.worker.models.layouts import stated

DENSE = {"model_type": "qwen3_5_text", "head_dim": 256, "linear_num_key_heads": 16, "intermediate_size": 256}
SMALL = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16}
LARGE = {"hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48}
MIXTURE = {
    "model_type": "qwen3_5_moe_text",
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "0.8B": ({**DENSE, **SMALL}, 1),
    "27B, one of 4": ({**DENSE, **LARGE}, 4),
    "35B-A3B, one of 4": (MIXTURE, 4),
    "Next 80B, one of 8": ({**MIXTURE, "model_type": "qwen3_next", "intermediate_size": 256}, 8),
}
"""The published sizes of heads and rows, and ranks; MLPs, vocabulary and layers are fewer."""
GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention"],
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "hybrid_override_pattern": "ME*",
    "num_hidden_layers": 3,
}
SUPER = {
    **NEMOTRON,
    "hidden_size": 4096,
    "moe_latent_size": 1024,
    "mamba_num_heads": 128,
}
FALCON = {
    "model_type": "falcon_h1",
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 48,
    "mamba_d_state": 256,
    "intermediate_size": 256,
}
MAMBAS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Granite 4 H tiny, one of 4": (GRANITE, 4, 12, 1),
    "Nemotron 3 Nano, one of 4": (NEMOTRON, 4, 16, 2),
    "Nemotron 3 Super, one of 4": (SUPER, 4, 32, 2),
    "Falcon-H1 1.5B, one of 2": (FALCON, 2, 24, 1),
}
"""With heads and groups of a rank."""


FLASH = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_attention_heads": 20,
    "intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
KIMI = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENTS: dict[str, tuple[dict[str, Any], int]] = {
    "GLM-4.7-Flash": (FLASH, 1),
    "GLM-4.7-Flash, one of 4": (FLASH, 4),
    "DeepSeek V3, one of 16": (DEEPSEEK, 16),
    "Kimi K2, one of 8": ({**DEEPSEEK, "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1}, 8),
}


E2B = {
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}


LOCAL, WIDE = "sliding_attention", "full_attention"
GEMMA = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "layer_types": [LOCAL, WIDE],
    "tie_word_embeddings": True,
}
A4B = {
    **GEMMA,
    "hidden_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "intermediate_size": 2112,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 704,
}
DENSE_31B = {
    **GEMMA,
    "hidden_size": 5376,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "intermediate_size": 512,
}
VL = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "layer_types": [WIDE] * 2}
LIQUID = {
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "moe_intermediate_size": 1792,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "layer_types": ["conv", WIDE],
}
ATTENTIONS: dict[str, tuple[dict[str, Any], int, list[tuple[int, int]]]] = {
    "Gemma 4 26B-A4B": (A4B, 1, [(8, 256), (2, 512)]),
    "Gemma 4 26B-A4B, one of 2": (A4B, 2, [(4, 256), (1, 512)]),
    "Gemma 4 26B-A4B, one of 8": (A4B, 8, [(1, 256), (1, 512)]),
    "Gemma 4 31B, one of 4": (DENSE_31B, 4, [(4, 256), (1, 512)]),
    "Gemma 4 31B, one of 8": (DENSE_31B, 8, [(2, 256), (1, 512)]),
    "LFM2-8B-A1B": (LIQUID, 1, [(8, 64)]),
    "LFM2-8B-A1B, one of 4": (LIQUID, 4, [(2, 64)]),
    "Qwen3-VL-8B, one of 2": (
        {**VL, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 512},
        2,
        [(4, 128)] * 2,
    ),
    "Qwen3-VL-30B-A3B, one of 8": (
        {
            **VL,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "moe_intermediate_size": 768,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        8,
        [(1, 128)] * 2,
    ),
}
"""With KV heads and their sizes in each layer of attention: those that do not divide lie on several ranks."""


SLOW = (
    "27B, one of 4",
    "35B-A3B, one of 4",
    "DeepSeek V3, one of 16",
    "GLM-4.7-Flash",
    "Gemma 4 26B-A4B",
    "Gemma 4 26B-A4B, one of 2",
    "Gemma 4 31B, one of 4",
    "Gemma 4 31B, one of 8",
    "Kimi K2, one of 8",
    "LFM2-8B-A1B",
    "Nemotron 3 Nano, one of 4",
    "Nemotron 3 Super, one of 4",
    "Qwen3-VL-8B, one of 2",
)
"""What has many weights, or a layer like one that stays."""


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in table]


def share(folder: Path, changes: dict[str, Any], size: int) -> DecoderLayout:
    """That of the last rank, with random weights."""
    types = {"layer_types": ["linear_attention", "full_attention"]}
    types = {} if changes["model_type"] in ("nemotron_h", "glm4_moe_lite", "deepseek_v3") else types
    config = {"vocab_size": 64 * size, "num_hidden_layers": 2, "max_position_embeddings": 512, **types, **changes}
    config |= {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    group: TensorParallelGroup = FakeGroup(size - 1, _Meeting(size, 1.0))
    layout: DecoderLayout = stated(folder, group, load_format="dummy")
    return layout


@pytest.mark.parametrize("case", cases(CASES))
def test_layers_of_real_width_are_those_of_the_reference(case, tmp_path):
    changes, size = CASES[case]
    layout = share(tmp_path, changes, size)
    net = layout.layers[0].state
    assert isinstance(net, GatedDeltaNet)
    assert (net.num_key_heads, net.num_value_heads) == (16 // size, changes["linear_num_value_heads"] // size)
    assert attention_of(layout.layers[1]).num_heads == changes["num_attention_heads"] // size
    assert_layers_are_right(layout)


@pytest.mark.parametrize("case", cases(MAMBAS))
def test_layers_of_real_width_with_mamba2_are_those_of_the_reference(case, tmp_path):
    changes, size, heads, groups = MAMBAS[case]
    layout = share(tmp_path, changes, size)
    net = layout.layers[0].state
    assert isinstance(net, Mamba2)
    assert (net.num_heads, net.num_groups) == (heads, groups)
    assert_layers_are_right(layout)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_layers_of_the_width_of_gemma_4_e2b_are_those_of_the_reference(size, tmp_path):
    layout = share(tmp_path, E2B, size)
    attentions = [attention_of(layer) for layer in layout.layers]
    assert [(one.num_heads, one.head_dim, one.kv_source) for one in attentions] == [
        (8 // size, 256, None),
        (8 // size, 512, None),
        (8 // size, 256, 0),
        (8 // size, 512, 1),
    ]
    assert layout.inputs is not None
    assert layout.inputs.table.shape == (256, 4 * 256)
    assert_layers_are_right(layout)


@pytest.mark.parametrize("case", cases(ATTENTIONS))
def test_layers_of_real_width_with_attention_are_those_of_the_reference(case, tmp_path):
    changes, size, heads = ATTENTIONS[case]
    layout = share(tmp_path, changes, size)
    attentions = [layer.attention for layer in layout.layers if layer.attention is not None]
    assert [(one.num_kv_heads, one.head_dim) for one in attentions] == heads
    assert_layers_are_right(layout)


@pytest.mark.parametrize("case", cases(LATENTS))
def test_layers_of_real_width_with_latents_are_those_of_the_reference(case, tmp_path):
    changes, size = LATENTS[case]
    layout = share(tmp_path, changes, size)
    attention = layout.layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert (attention.num_heads, attention.key_dim) == (changes["num_attention_heads"] // size, 576)
    assert_layers_are_right(layout)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_layers_of_the_width_of_kimi_linear_are_those_of_the_reference(size, tmp_path):
    layout = share(tmp_path, KIMI, size)
    net, latent = layout.layers[0].state, layout.layers[1].attention
    assert isinstance(net, GatedDeltaNet)
    assert (net.num_value_heads, net.key_dim, net.value_dim, net.gate_inputs) == (32 // size, 128, 128, 256)
    assert isinstance(latent, LatentAttention)
    assert (latent.num_heads, latent.key_dim, latent.rotary) == (32 // size, 576, None)
    assert_layers_are_right(layout)


def assert_layers_are_right(layout: DecoderLayout) -> None:
    runner = Runner(layout)
    x = torch.randn(NUM_TOKENS, layout.hidden_size, generator=torch.Generator().manual_seed(1))
    ours, reference = _Provable(runner.executor, 16), Reference(layout)
    for index in range(len(layout.layers)):
        expected = reference.run_layer(index, x)
        difference = (ours.run_layer(index, x) - expected).abs().max() / (expected - x).abs().max()
        assert difference < 1e-5, index
    runner.executor.close()
