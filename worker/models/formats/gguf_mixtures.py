"""Architectures of GGUF files with attention and mixtures of experts in some or all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.formats.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    NORMS,
    PAIRED,
    TOP,
    Architecture,
    weights,
)
from holdfast.worker.models.formats.gguf_changes import row
from holdfast.worker.models.formats.gguf_dense_configs import ernie, granite, qwen3
from holdfast.worker.models.formats.gguf_experts import (
    GRANITE_MOE,
    MIXTRAL,
    QWEN_EXPERTS,
    QWEN_ROUTER,
    QWEN_SHARED,
    SIGMOID,
    check_scores,
    groups_of_experts,
    inner_of_experts,
    local_experts,
    qwen_experts,
    shared_experts,
)
from holdfast.worker.models.formats.gguf_metadata import Metadata
from holdfast.worker.models.formats.gguf_settings import any_layer_has, attention_bias, rms, sizes, usual, windows

_QWEN_MOE: Final = {**QWEN_ROUTER, **QWEN_EXPERTS}
_GPT_OSS_YARN: Final = {"truncate": False}
"""No metadata say it."""


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    inner = metadata.count("expert_shared_feed_forward_length")
    return usual(metadata) | qwen_experts(metadata, normalized=False) | {"shared_expert_intermediate_size": inner}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return qwen3(metadata) | qwen_experts(metadata, normalized=True)


def _ernie_moe(metadata: Metadata) -> dict[str, Any]:
    check_scores(metadata)
    return ernie(metadata) | {
        "moe_num_experts": metadata.count("expert_count"),
        "moe_k": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.natural("expert_shared_count"),
        "moe_layer_start_index": metadata.natural("leading_dense_block_count"),
        "moe_layer_interval": metadata.count("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    check_scores(metadata, SIGMOID, may_scale=True)
    return (
        sizes(metadata, is_partial=True)
        | rms(metadata)
        | attention_bias(metadata)
        | groups_of_experts(metadata)
        | {
            "use_qk_norm": any_layer_has(metadata, "attn_q_norm.weight"),
            "n_routed_experts": metadata.count("expert_count"),
            "num_experts_per_tok": metadata.count("expert_used_count"),
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
            "n_shared_experts": metadata.count("expert_shared_count"),
            "first_k_dense_replace": metadata.natural("leading_dense_block_count"),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        }
    )


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    found = usual(metadata) | attention_bias(metadata) | windows(metadata, period=2) | local_experts(metadata)
    return found | {"rope_parameters": {**found["rope_parameters"], **_GPT_OSS_YARN}}


def _hunyuan_moe(metadata: Metadata) -> dict[str, Any]:
    check_scores(metadata)
    return qwen3(metadata) | {
        "num_experts": metadata.count("expert_count"),
        "moe_topk": metadata.count("expert_used_count"),
        "intermediate_size": inner_of_experts(metadata),
    }


def _minimax_m2(metadata: Metadata) -> dict[str, Any]:
    return sizes(metadata, is_partial=True) | rms(metadata) | local_experts(metadata, SIGMOID)


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    check_scores(metadata)
    return qwen3(metadata) | {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": inner_of_experts(metadata),
        "norm_topk_prob": False,
    }


_QWEN3_MOE: Final = Architecture(
    model_type="qwen3_moe",
    settings=_qwen3_moe,
    top=TOP,
    parts=(weights({**NORMS, **ATTENTION, **HEAD_NORMS, **_QWEN_MOE}),),
)

MIXTURES: Final[Mapping[str, Architecture]] = {
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        settings=_ernie_moe,
        top=TOP,
        parts=(
            weights({**NORMS, **ATTENTION}),
            weights(MLP),
            {**weights(_QWEN_MOE), "exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
            weights(shared_experts("mlp.shared_experts")),
        ),
        changes={"exp_probs_b.bias": row},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        settings=_glm4_moe,
        top=TOP,
        parts=(
            weights(
                {
                    "attn_norm": "input_layernorm",
                    **ATTENTION,
                    "post_attention_norm": "post_attention_layernorm",
                }
            ),
            weights(HEAD_NORMS),
            weights(MLP),
            {
                **weights({**_QWEN_MOE, **shared_experts("mlp.shared_experts")}),
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            },
        ),
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        settings=_gpt_oss,
        top=TOP,
        parts=(
            {
                **weights(
                    {
                        "attn_norm": "input_layernorm",
                        **ATTENTION,
                        "post_attention_norm": "post_attention_layernorm",
                        **QWEN_EXPERTS,
                        "ffn_gate_inp": "mlp.router",
                    }
                ),
                "attn_sinks.weight": "self_attn.sinks",
            },
        ),
    ),
    "granitemoe": Architecture(
        model_type="granitemoe",
        settings=lambda metadata: granite(metadata) | local_experts(metadata),
        top=TOP,
        parts=(weights({**NORMS, **ATTENTION, **GRANITE_MOE}),),
        changes=PAIRED,
    ),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe",
        settings=_hunyuan_moe,
        top=TOP,
        parts=(
            weights(
                {
                    **NORMS,
                    **ATTENTION,
                    "attn_q_norm": "self_attn.query_layernorm",
                    "attn_k_norm": "self_attn.key_layernorm",
                    **QWEN_EXPERTS,
                    "ffn_gate_inp": "mlp.gate.wg",
                    **shared_experts("mlp.shared_mlp"),
                }
            ),
        ),
    ),
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        settings=_minimax_m2,
        top=TOP,
        parts=(
            {
                **weights({**NORMS, **ATTENTION, **HEAD_NORMS, **MIXTRAL}),
                "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            },
        ),
    ),
    "olmoe": replace(_QWEN3_MOE, model_type="olmoe", settings=_olmoe),
    "qwen2moe": replace(
        _QWEN3_MOE,
        model_type="qwen2_moe",
        settings=_qwen2_moe,
        parts=(weights({**NORMS, **ATTENTION, **_QWEN_MOE, **QWEN_SHARED}),),
        changes={"ffn_gate_inp_shexp.weight": row},
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
}
"""Architectures by `general.architecture`. Mixtral's models are written as llama's (`gguf_dense.py`)."""
