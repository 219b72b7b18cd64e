"""Architectures of GGUF files whose layers differ, or keep states or latents: Gemma 4, LFM2, Granite 4 H, Nemotron,
Falcon-H1, Mamba2, Qwen3.5, Qwen3-Next, DeepSeek, GLM-4.7-Flash. What llama.cpp's converter changes is undone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.worker.models.formats import gguf_gemma4
from holdfast.worker.models.formats import gguf_state_configs as configs
from holdfast.worker.models.formats.gguf_architecture import ATTENTION, PAIRED, QKV, TOP, Architecture, gated, weights
from holdfast.worker.models.formats.gguf_changes import (
    Change,
    absorbed,
    behind_keys,
    columns_of_value_heads,
    convolution,
    decays,
    rates_and_times,
    row,
    value_heads,
    vector,
)
from holdfast.worker.models.formats.gguf_experts import (
    GRANITE_MOE,
    QWEN_EXPERTS,
    QWEN_ROUTER,
    QWEN_SHARED,
    shared_experts,
)


def _mamba(module: str) -> dict[str, str]:
    own = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    vectors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {name: f"{module}.{one}" for name, one in {**weights(own), **vectors}.items()}


_MAMBA_CHANGES: Final[Mapping[str, Change]] = {
    "ssm_a": decays,
    "ssm_d": vector,
    "ssm_norm.weight": vector,
    "ssm_conv1d.weight": convolution,
}
_DELTA_NET: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_VECTORS: Final = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN_LAYER: Final = (
    weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}),
    weights({**ATTENTION, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
)
_RATE_AND_TIME: Final = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_QWEN_MOE: Final = weights({**QWEN_ROUTER, **QWEN_EXPERTS, **QWEN_SHARED})
_QWEN_CHANGES: Final[Mapping[str, Change]] = {
    "attn_qkv.weight": value_heads(behind_keys),
    "attn_gate.weight": value_heads(lambda config: (0, config["linear_value_head_dim"])),
    **dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"), value_heads(lambda config: (0, 1))),
    "ssm_a": value_heads(lambda config: (0, 1), decays),
    "ssm_conv1d.weight": value_heads(behind_keys, convolution),
    "ssm_out.weight": columns_of_value_heads,
    "ffn_gate_inp_shexp.weight": row,
}
_LFM2: Final = Architecture(
    model_type="lfm2",
    has_usual_shapes=False,
    settings=configs.lfm2,
    top={
        **weights({"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}),
        "output.weight": "lm_head.weight",
    },
    parts=(
        weights({"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}),
        weights(
            {
                **QKV,
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
            }
        ),
        weights({f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}),
        weights(gated("feed_forward", "w1", "w3", "w2")),
    ),
    changes={"shortconv.conv.weight": convolution},
)
_NEMOTRON: Final = Architecture(
    model_type="nemotron_h",
    has_usual_shapes=False,
    settings=configs.nemotron_h,
    top=weights({"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}),
    parts=(
        {"attn_norm.weight": "norm.weight"},
        _mamba("mixer"),
        weights({name: module.replace("self_attn", "mixer") for name, module in ATTENTION.items()}),
        weights({"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}),
        {
            "ffn_gate_inp.weight": "mixer.gate.weight",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps.weight": "mixer.experts.{}.up_proj.weight",
            "ffn_down_exps.weight": "mixer.experts.{}.down_proj.weight",
            "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
            "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
        },
    ),
    changes={**_MAMBA_CHANGES, **PAIRED},
)
_QWEN35: Final = Architecture(
    model_type="qwen3_5_text",
    has_usual_shapes=False,
    settings=configs.qwen_delta_net,
    top=TOP,
    parts=(*_QWEN_LAYER, {**weights({**_DELTA_NET, **_RATE_AND_TIME}), **_DELTA_VECTORS}, weights(gated("mlp"))),
    changes=_QWEN_CHANGES,
    plus=-1.0,
)
_QWEN35_MOE: Final = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    parts=(*_QWEN35.parts[:-1], _QWEN_MOE),
)

WITH_STATES: Final[Mapping[str, Architecture]] = {
    "deepseek2": Architecture(
        model_type=configs.model_type_of_latents,
        has_usual_shapes=False,
        settings=configs.deepseek,
        top=TOP,
        parts=(
            weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
            weights({"attn_q": "self_attn.q_proj"}),
            weights(
                {
                    "attn_q_a": "self_attn.q_a_proj",
                    "attn_q_a_norm": "self_attn.q_a_layernorm",
                    "attn_q_b": "self_attn.q_b_proj",
                }
            ),
            weights(
                {
                    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                    "attn_output": "self_attn.o_proj",
                }
            ),
            weights({"attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj"}),
            weights({"attn_kv_b": "self_attn.kv_b_proj"}),
            weights(gated("mlp")),
            {
                "ffn_gate_inp.weight": "mlp.gate.weight",
                "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
                **weights({**QWEN_EXPERTS, **shared_experts("mlp.shared_experts")}),
            },
        ),
        optional=frozenset({"exp_probs_b.bias"}),
        changes={"attn_k_b.weight": absorbed, "attn_v_b.weight": absorbed},
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        has_usual_shapes=False,
        settings=configs.falcon_h1,
        top={**TOP, "output_norm.weight": "model.final_layernorm.weight"},
        parts=(
            {"attn_norm.weight": "input_layernorm.weight", "ffn_norm": "pre_ff_layernorm.weight"},
            weights({**ATTENTION, **gated("feed_forward")}),
            _mamba("mamba"),
        ),
        optional=frozenset({"ssm_norm.weight"}),
        changes=_MAMBA_CHANGES,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        has_usual_shapes=False,
        settings=gguf_gemma4.gemma4,
        top={**TOP, **gguf_gemma4.OWN_INPUTS},
        parts=gguf_gemma4.PARTS,
        optional=frozenset(gguf_gemma4.OWN_INPUTS),
        changes={"ffn_gate_up_exps.weight": gguf_gemma4.gate_and_up},
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        has_usual_shapes=False,
        settings=configs.granite_hybrid,
        top=TOP,
        parts=(
            weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
            weights(ATTENTION),
            _mamba("mamba"),
            weights(gated("shared_mlp", "input_linear", "input_linear", "output_linear")),
            weights(
                {
                    "ffn_gate_shexp": "shared_mlp.input_linear",
                    "ffn_up_shexp": "shared_mlp.input_linear",
                    "ffn_down_shexp": "shared_mlp.output_linear",
                }
            ),
            weights(GRANITE_MOE),
        ),
        changes={**_MAMBA_CHANGES, **PAIRED},
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        settings=configs.lfm2_moe,
        parts=(
            *_LFM2.parts,
            {
                **weights(
                    {
                        "ffn_gate_inp": "feed_forward.gate",
                        "ffn_gate_exps": "feed_forward.experts.{}.w1",
                        "ffn_up_exps": "feed_forward.experts.{}.w3",
                        "ffn_down_exps": "feed_forward.experts.{}.w2",
                    }
                ),
                "exp_probs_b.bias": "feed_forward.expert_bias",
            },
        ),
        optional=frozenset({"exp_probs_b.bias"}),
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        has_usual_shapes=False,
        settings=configs.mamba2,
        top=weights({"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}),
        parts=({"attn_norm.weight": "norm.weight"}, _mamba("mixer")),
        base="backbone.layers.",
        changes=_MAMBA_CHANGES,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        parts=(
            *_QWEN_LAYER,
            {**weights({**_DELTA_NET, "ssm_ba": "linear_attn.in_proj_ba"}), **_DELTA_VECTORS},
            _QWEN_MOE,
        ),
        changes={
            "ssm_a": decays,
            "ssm_conv1d.weight": convolution,
            "ssm_ba.weight": rates_and_times,
            "ffn_gate_inp_shexp.weight": row,
        },
    ),
}
"""Architectures by `general.architecture`. Qwen3-Next is read as a mixture of Qwen3.5, whose layers are the same."""
