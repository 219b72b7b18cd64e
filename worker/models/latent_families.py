"""Families with multi-head latent attention, stated (`families.py`): DeepSeek V2 and V3, GLM-4.7-Flash, Kimi Linear."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.executors.layout_arithmetic import delta_state_length
from holdfast.worker.models.family import DeltaPacking, Family
from holdfast.worker.models.family_bases import DEEPSEEK_MOE, LAYER_BEHIND, PLAIN


def _derive(config: Any) -> None:
    """Heads of another size than the rotary angles are not the config's `head_dim`."""
    config.head_dim = config.qk_rope_head_dim
    if getattr(config, "mlp_layer_types", ()) is None:
        config.mlp_layer_types = ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)


def _scaling(config: Any) -> float:
    """Factor of yarn on scores, once for queries and once for keys."""
    rope = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    if weight and rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
    return float(scale)


_V3: Final = replace(
    PLAIN,
    architecture="DeepseekV3ForCausalLM",
    entries={
        "num_key_value_heads": 128,
        "eos_token_id": 1,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    derive=_derive,
    unused=(r"^model\.layers\.{num_hidden_layers}\.",),
    latent=True,
    next_token=LAYER_BEHIND,
    scaling=_scaling,
    interleaved="rope_interleave",
    moe=DEEPSEEK_MOE,
)


def _is_sparse(config: Any, index: int) -> bool:
    return bool(config.mlp_layer_types[index] == "sparse")


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _V3.entries.items() if name not in names}


def _groups(config: Any) -> bool:
    return bool(config.topk_method == "group_limited_greedy")


def _derive_kimi(config: Any) -> None:
    """The checkpoint has the entries of linear attention together, and layers counted from 1."""
    _derive(config)
    linear = config.linear_attn_config or {}
    config.linear_head_dim = linear.get("head_dim", config.linear_head_dim)
    config.linear_num_heads = linear.get("num_heads", config.linear_num_heads)
    config.linear_conv_kernel_dim = linear.get("short_conv_kernel_size", config.linear_conv_kernel_dim)
    layers = range(config.num_hidden_layers)
    if config.layer_types is None and linear.get("full_attn_layers") is not None and "kda_layers" in linear:
        full = linear["full_attn_layers"]
        config.layer_types = ["full_attention" if index + 1 in full else "linear_attention" for index in layers]
    elif config.layer_types is None:
        config.layer_types = ["linear_attention" if index % 4 or not index else "full_attention" for index in layers]
    if config.mlp_layer_types is None:
        config.mlp_layer_types = ["dense" if index < config.first_k_dense_replace else "sparse" for index in layers]


def _kimi_state_length(config: Any, num_drafts: int) -> int:
    heads, size, rows = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim - 1 + num_drafts
    return delta_state_length(heads, heads, size, size, rows, by_key=True)


LATENTS: Final[Mapping[str, Family]] = {
    "deepseek_v2": replace(
        _V3,
        architecture="DeepseekV2ForCausalLM",
        entries={
            **_without("rope_interleave", "norm_topk_prob"),
            "num_key_value_heads": None,
            "eos_token_id": 2,
            "mlp_bias": False,
            "first_k_dense_replace": 0,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 1407,
        },
        aliases={"num_experts": "n_routed_experts"},
        mlp_bias="mlp_bias",
        next_token=None,
        interleaved=True,
        moe=replace(
            DEEPSEEK_MOE,
            scoring="softmax",
            selection_bias=None,
            num_groups=lambda config: int(config.n_group) if _groups(config) else 1,
            top_groups=lambda config: int(config.topk_group) if _groups(config) else 1,
            group_best=1,
            normalized=False,
            least_sum=lambda config: 0.0,
        ),
    ),
    "deepseek_v3": _V3,
    "glm4_moe_lite": replace(
        _V3,
        architecture="Glm4MoeLiteForCausalLM",
        entries={
            **_without("first_k_dense_replace"),
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": None,
        },
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        partial=1.0,
        moe=replace(DEEPSEEK_MOE, in_layer=_is_sparse),
    ),
    "kimi_linear": replace(
        _V3,
        architecture="KimiLinearForCausalLM",
        entries={
            **_without("rope_interleave"),
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 163586,
            "q_lora_rank": None,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
            "layer_types": None,
            "linear_attn_config": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        aliases={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        derive=_derive_kimi,
        layer_types=frozenset({"full_attention", "linear_attention"}),
        stored_as=((".mlp.", ".block_sparse_moe."),),
        unused=(),
        next_token=None,
        interleaved=False,
        rotates=lambda config, index: False,
        scaling=lambda config: float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5),
        state_lengths={"linear_attention": _kimi_state_length},
        delta_net=DeltaPacking.APART,
        moe=replace(DEEPSEEK_MOE, in_layer=_is_sparse, parts=("w1", "w3", "w2")),
    ),
}
"""Families by `model_type`."""
