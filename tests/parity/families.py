"""Tiny random models of many families, made offline and saved as ordinary Hugging Face folders.

Weights are N(0, 0.15): with the usual 0.02 the layers hardly change the logits, and wrong layers pass.
"""

from pathlib import Path
from typing import Any

import torch

from holdfast.worker.models.families import DECODERS

BASE: dict[str, Any] = {
    "vocab_size": 126,  # divides by neither 4 nor 64
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MHA = {"num_key_value_heads": None}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

SERVED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": MHA,
    "cohere": {},
    "cohere2": WINDOWS,
    "cwm": WINDOWS,
    "deepseek_v2": {**LATENT, **MOE, **ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **MOE, **ROUTED},
    "ernie4_5": {},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "num_experts": 4, "moe_layer_start_index": 1},
    "exaone4": WINDOWS,
    "gemma": {},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **WINDOWS,
        **MOE,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "final_logit_softcapping": 3.0,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe_lite": {
        **LATENT,
        **MOE,
        **{key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"},
        "v_head_dim": 12,
        "head_dim": ...,
    },
    "glm4_moe": {**MOE, **ROUTED, "num_local_experts": 4, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    "gpt2": MHA,
    "gpt_bigcode": {"head_dim": ..., "num_key_value_heads": ...},
    "gpt_neox": MHA,
    "gpt_oss": {**WINDOWS, **MOE, "num_local_experts": 4, "rope_parameters": YARN},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "granitemoe": {**MOE, "num_local_experts": 4},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "llama": {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "minimax_m2": {**MOE, "num_local_experts": 4},
    "ministral": WINDOWS,
    "ministral3": {"rope_parameters": {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "nemotron": {},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": WINDOWS,
    "olmoe": {**MOE, "num_experts": 4},
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": MHA,
    "phi": {},
    "phi3": {},
    "phimoe": {**MOE, "num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": {**MOE, "num_experts": 4},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 4},
}
"""What is added to `BASE` for each family that must be exact; `...` takes a value away."""

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
WITH_STATES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, **MOE, "num_local_experts": 4},
    "lfm2_moe": {**MOE, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron_h": {
        **MOE,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "num_hidden_layers": ...,
    },
}
"""Likewise, of families whose layers keep states, where `BASE` is not enough."""

_ENCODER = {"num_key_value_heads": ..., "head_dim": ..., "num_hidden_layers": 3}
_ROBERTA = {**_ENCODER, "max_position_embeddings": 130, "bos_token_id": 0, "pad_token_id": 1}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "camembert": _ROBERTA,
    "modernbert": {**_ENCODER, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "roberta": _ROBERTA,
    "xlm-roberta": {**_ROBERTA, "type_vocab_size": 1},
}
"""Likewise, of encoders."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads and biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "cohere, norms of each head": ("cohere", {"use_qk_norm": True}),
    "stablelm, norms of each head": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "gemma4_text, shared keys": (
        "gemma4_text",
        {
            **WINDOWS,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_key_value_heads": 1,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 126,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "deepseek_v3, whole queries": ("deepseek_v3", {**SERVED["deepseek_v3"], "q_lora_rank": None}),
}
"""Turns of a family that other code paths serve."""

NOT_NATIVE = {
    **dict.fromkeys(SERVED.keys() - DECODERS.keys(), "not among the stated families"),
    "olmo": "config.json has clip_qkv",
}
"""Families and variants that the HF backend serves, and a word of why."""

NATIVE_ALONE = {"gemma4_text, shared keys"}
"""Variants that the HF backend refuses."""

NOT_SPLIT = {
    *("minimax_m2", "olmo2", "olmo3", "olmoe"),
    *("cohere, norms of each head", "stablelm, norms of each head"),
}
"""Served by the HF backend on several ranks: queries are normed over all heads, so ranks gather them."""

REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "diffllama": {},
    "falcon": {"head_dim": ...},
    "gptj": {"rotary_dim": 4},
    "llama4_text": {},
    "mamba": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "olmo_hybrid": {},
    "recurrent_gemma": {},
    "xglm": {},
}
"""Causal language models that would be silently wrong: something other than the paged cache holds their state."""


def executor_of(family: str, size: int = 1) -> str:
    """What runs a family or variant on so many ranks where the settings leave the choice."""
    return "hf" if family in NOT_NATIVE or (size > 1 and family in NOT_SPLIT) else "native"


def settings_of(family: str) -> tuple[str, dict[str, Any]]:
    """Model type and config values of a family or a variant."""
    model_type, extras = VARIANTS.get(family, (family, (SERVED | WITH_STATES | ENCODERS).get(family, {})))
    return model_type, {**BASE, **extras}


def save_tiny_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a random model of a family (or variant) to `folder` and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = settings_of(family)
    values = {**values, **REFUSED.get(family, {}), **changes}
    config = AutoConfig.for_model(model_type, **{key: value for key, value in values.items() if value is not ...})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.save_pretrained(folder)
    return folder


def randomize(model: torch.nn.Module, seed: int = 0, std: float = 0.15) -> None:
    """Fills all parameters with noise, and adds some to buffers that are saved; norms go on scaling by about one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            scales = "Norm" in owner and name.endswith("weight") and not owner.endswith("1P")  # those scale by 1 + w
            noise = torch.empty_like(parameter).normal_(0.0, std, generator=generator)
            parameter.copy_(noise + parameter if scales else noise)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.empty_like(buffer).normal_(0.0, std, generator=generator))
