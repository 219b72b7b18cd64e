"""Architectures of GGUF files whose layers are attention and an MLP. Mistral's models are written as llama's, the text
models of Qwen2-VL and Qwen3-VL as separate ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.worker.models.formats import gguf_dense_configs as configs
from holdfast.worker.models.formats.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    MLP,
    NORMS,
    PAIRED,
    QKV,
    TOP,
    Architecture,
    weights,
)
from holdfast.worker.models.formats.gguf_changes import parts_of_heads, queries_keys_values
from holdfast.worker.models.formats.gguf_experts import MIXTRAL
from holdfast.worker.models.formats.gguf_settings import usual

_UP_DOWN: Final = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS_AROUND: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_BEHIND: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_LLAMA: Final = Architecture(
    model_type=lambda metadata: "mixtral" if metadata.get("expert_count") else "llama",
    settings=configs.llama,
    top=TOP,
    parts=(
        weights({**NORMS, **ATTENTION}),
        weights(MLP),
        weights(MIXTRAL),
    ),
    changes=PAIRED,
)
_QWEN2: Final = Architecture(
    model_type="qwen2", settings=usual, top=TOP, parts=(weights({**NORMS, **ATTENTION, **MLP}),)
)
_QWEN3: Final = replace(
    _QWEN2,
    model_type="qwen3",
    settings=configs.qwen3,
    parts=(weights({**NORMS, **ATTENTION, **HEAD_NORMS, **MLP}),),
)
_PAIRED_DENSE: Final = replace(_LLAMA, parts=_LLAMA.parts[:2])
_GEMMA_AROUND: Final = Architecture(
    model_type="gemma2",
    settings=configs.gemma2,
    top=TOP,
    parts=(weights({**_NORMS_AROUND, **ATTENTION, **MLP}),),
    plus=-1.0,
)

DENSE: Final[Mapping[str, Architecture]] = {
    "arcee": replace(
        _PAIRED_DENSE,
        model_type="arcee",
        settings=configs.arcee,
        parts=(weights({**NORMS, **ATTENTION, **_UP_DOWN}),),
    ),
    "cohere2": replace(
        _QWEN2,
        model_type="cohere2",
        settings=configs.cohere2,
        parts=(weights({"attn_norm": "input_layernorm", **ATTENTION, **MLP}),),
    ),
    "command-r": replace(
        _QWEN2,
        model_type="cohere",
        settings=configs.command_r,
        parts=(weights({"attn_norm": "input_layernorm", **ATTENTION, **MLP}), weights(HEAD_NORMS)),
    ),
    "ernie4_5": replace(_QWEN2, model_type="ernie4_5", settings=configs.ernie),
    "exaone4": replace(
        _QWEN2,
        model_type="exaone4",
        settings=configs.exaone4,
        parts=(weights({**ATTENTION, **HEAD_NORMS, **_NORMS_BEHIND, **MLP}),),
    ),
    "gemma": replace(_QWEN2, model_type="gemma", settings=configs.gemma, plus=-1.0),
    "gemma2": _GEMMA_AROUND,
    "gemma3": replace(
        _GEMMA_AROUND,
        model_type="gemma3_text",
        settings=configs.gemma3,
        parts=(weights({**_NORMS_AROUND, **ATTENTION, **HEAD_NORMS, **MLP}),),
    ),
    "glm4": replace(
        _QWEN2,
        model_type="glm4",
        settings=configs.glm4,
        parts=(
            weights(
                {
                    **NORMS,
                    **ATTENTION,
                    "post_attention_norm": "post_self_attn_layernorm",
                    "ffn_up": "mlp.gate_up_proj",
                    "ffn_down": "mlp.down_proj",
                    "post_ffw_norm": "post_mlp_layernorm",
                }
            ),
        ),
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        settings=configs.gpt_neox,
        top=weights(
            {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
        ),
        base="gpt_neox.layers.",
        parts=(
            weights(
                {
                    **NORMS,
                    "attn_qkv": "attention.query_key_value",
                    "attn_output": "attention.dense",
                    "ffn_up": "mlp.dense_h_to_4h",
                    "ffn_down": "mlp.dense_4h_to_h",
                }
            ),
        ),
        changes=dict.fromkeys(("attn_qkv.weight", "attn_qkv.bias"), parts_of_heads),
    ),
    "granite": replace(_PAIRED_DENSE, model_type="granite", settings=configs.granite),
    "hunyuan-dense": replace(
        _QWEN3,
        model_type="hunyuan_v1_dense",
        parts=(
            weights(
                {
                    **NORMS,
                    **ATTENTION,
                    **MLP,
                    "attn_q_norm": "self_attn.query_layernorm",
                    "attn_k_norm": "self_attn.key_layernorm",
                }
            ),
        ),
    ),
    "llama": _LLAMA,
    "mistral3": replace(
        _PAIRED_DENSE,
        model_type=lambda metadata: "mistral" if metadata.get("attention.temperature_scale") is None else "ministral3",
        settings=configs.mistral3,
    ),
    "nemotron": replace(
        _QWEN2,
        model_type="nemotron",
        settings=configs.nemotron,
        parts=(weights({**NORMS, **ATTENTION, **_UP_DOWN}),),
        plus=-1.0,
    ),
    "olmo": Architecture(
        model_type="olmo",
        settings=configs.olmo,
        top=weights({"token_embd": "model.embed_tokens", "output": "lm_head"}),
        parts=(weights({**ATTENTION, **MLP}),),
        changes=PAIRED,
    ),
    "olmo2": replace(
        _QWEN2,
        model_type=lambda metadata: "olmo3" if metadata.get("attention.sliding_window") else "olmo2",
        settings=configs.olmo2,
        parts=(weights({**ATTENTION, **HEAD_NORMS, **_NORMS_BEHIND, **MLP}),),
    ),
    "phi2": Architecture(
        model_type="phi",
        settings=configs.phi2,
        top={**TOP, "output_norm.weight": "model.final_layernorm.weight"},
        parts=(
            weights(
                {
                    "attn_norm": "input_layernorm",
                    "attn_output": "self_attn.dense",
                    "ffn_up": "mlp.fc1",
                    "ffn_down": "mlp.fc2",
                }
            ),
            weights(QKV),
            {"attn_qkv.weight": "self_attn.qkv_proj.weight"},
        ),
        changes=dict.fromkeys(("attn_qkv.weight", "attn_qkv.bias"), queries_keys_values),
    ),
    "phi3": replace(
        _QWEN2,
        model_type="phi3",
        settings=configs.phi3,
        parts=(
            weights(
                {
                    **NORMS,
                    "attn_qkv": "self_attn.qkv_proj",
                    "attn_output": "self_attn.o_proj",
                    "ffn_up": "mlp.gate_up_proj",
                    "ffn_down": "mlp.down_proj",
                }
            ),
        ),
    ),
    "qwen2": _QWEN2,
    "qwen2vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3vl": _QWEN3,
    "seed_oss": replace(
        _QWEN2,
        model_type="seed_oss",
        settings=configs.seed,
        parts=(
            weights(
                {
                    "attn_norm": "input_layernorm",
                    **ATTENTION,
                    "post_attention_norm": "post_attention_layernorm",
                    **MLP,
                }
            ),
        ),
    ),
    "smollm3": replace(_PAIRED_DENSE, model_type="smollm3", settings=configs.smollm3),
    "stablelm": replace(
        _QWEN2,
        model_type="stablelm",
        settings=configs.stablelm,
        parts=(
            weights({"attn_norm": "input_layernorm", **ATTENTION, **MLP}),
            {"ffn_norm.weight": "post_attention_layernorm.weight"},
            weights(
                {
                    "attn_q_norm": "self_attn.q_layernorm.norms.{}",
                    "attn_k_norm": "self_attn.k_layernorm.norms.{}",
                }
            ),
        ),
    ),
    "starcoder2": replace(
        _QWEN2,
        model_type="starcoder2",
        settings=configs.starcoder2,
        parts=(weights({**NORMS, **ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),),
    ),
}
"""Architectures by `general.architecture`."""
