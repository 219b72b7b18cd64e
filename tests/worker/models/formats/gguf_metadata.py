"""What llama.cpp's converter writes into GGUF files of models with attention in all layers, beside tensors."""

from collections.abc import Mapping
from typing import Any

PERMUTED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3")
ADDED_TO = ("gemma", "gemma2", "gemma3", "nemotron")
PARTIAL = ("glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "phi3", "stablelm")
"""Architectures that rotate a part of each head."""
WITH_HEAD_DIM = (
    *("ernie4_5", "ernie4_5-moe", "exaone4", "gemma", "gemma2", "gemma3", "glm4", "glm4moe", "gpt-oss"),
    *("hunyuan-dense", "hunyuan-moe", "minimax-m2", "mistral3", "nemotron", "qwen3", "qwen3moe", "qwen3vl"),
    *("qwen3vlmoe", "seed_oss"),
)
"""Architectures whose configs have `head_dim`, which the converter writes."""
WITH_OWN_INNER = ("ernie4_5-moe", "glm4moe", "qwen2moe", "qwen3moe", "qwen3vlmoe")
"""Mixtures whose experts have a size of their own."""


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """As the converter writes it."""
    heads = config["num_attention_heads"]
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "vocab_size": config["vocab_size"],
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if architecture in WITH_HEAD_DIM:
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    parts = (_norms(architecture, config), _angles(architecture, config, head_dim), _experts(architecture, config))
    for part in (*parts, _windows(architecture, config), _scales(architecture, config)):
        found |= part
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _norms(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if "rms_norm_eps" in config:
        return {"attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}
    names = ("layer_norm_eps", "norm_epsilon", "norm_eps")
    return {"attention.layer_norm_epsilon": float(next((config[name] for name in names if name in config), 1e-5))}


def _angles(architecture: str, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {} if architecture in ("gptneox", "phi2") else {"rope.freq_base": float(rope["rope_theta"])}
    turned = rope.get("partial_rotary_factor", 1.0) if architecture in PARTIAL else 1.0
    if architecture in PERMUTED or architecture in PARTIAL:
        found["rope.dimension_count"] = int(head_dim * turned)
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    if "llama_4_scaling_beta" in rope:
        found["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        found["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    return found


def _experts(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts")
    count = next((config[name] for name in counts if config.get(name)), None)
    if count is None or architecture == "hunyuan-dense":
        return {}
    used = next(config[name] for name in ("moe_k", "moe_topk", "num_experts_per_tok") if name in config)
    found: dict[str, Any] = {"expert_count": count, "expert_used_count": used}
    own = {
        "ernie4_5-moe": {
            "expert_shared_count": config.get("moe_num_shared_experts"),
            "leading_dense_block_count": config.get("moe_layer_start_index"),
            "interleave_moe_layer_step": config.get("moe_layer_interval"),
        },
        "glm4moe": {
            "expert_shared_count": config.get("n_shared_experts"),
            "leading_dense_block_count": config.get("first_k_dense_replace"),
            "expert_gating_func": 2,
            "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
            "expert_weights_norm": config.get("norm_topk_prob"),
            "expert_group_count": config.get("n_group"),
            "expert_group_used_count": config.get("topk_group"),
        },
        "gpt-oss": {"expert_feed_forward_length": config["intermediate_size"]},
        "hunyuan-moe": {
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 1,
        },
        "minimax-m2": {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2},
        "qwen2moe": {"expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size")},
    }
    if "moe_intermediate_size" in config and architecture in (
        "ernie4_5-moe",
        "glm4moe",
        "qwen2moe",
        "qwen3moe",
        "qwen3vlmoe",
    ):
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found | {key: value for key, value in own.get(architecture, {}).items() if value is not None}


def _windows(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if architecture not in ("cohere2", "exaone4", "gemma2", "gemma3", "gpt-oss", "olmo2", "starcoder2"):
        return {}
    if not config.get("sliding_window"):
        return {}
    found: dict[str, Any] = {"attention.sliding_window": config["sliding_window"]}
    if architecture in ("cohere2", "exaone4", "olmo2"):
        found["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config["layer_types"]]
    return found


def _scales(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if architecture in ("granite", "granitemoe"):
        return {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    if architecture in ("command-r", "cohere2"):
        return {"logit_scale": float(config["logit_scale"])}
    if architecture == "gptneox":
        return {"use_parallel_residual": config["use_parallel_residual"]}
    if architecture == "gemma2":
        return {
            "attn_logit_softcapping": float(config["attn_logit_softcapping"]),
            "final_logit_softcapping": float(config["final_logit_softcapping"]),
        }
    return {}
