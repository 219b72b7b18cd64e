"""Configs of architectures whose layers keep states or latents, from a GGUF file's metadata (`gguf_states.py`)."""

from typing import Any, Final

from holdfast.worker.models.formats.gguf_experts import SIGMOID, SOFTMAX, check_scores, groups_of_experts
from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood
from holdfast.worker.models.formats.gguf_rotary import rope_parameters
from holdfast.worker.models.formats.gguf_settings import any_layer_has, granite_scales, kinds_of_layers, rows_of

_LOG_OF_YARN: Final = 0.1
"""llama.cpp's converter multiplies `mscale_all_dim` by it."""

_NO_LENGTH: Final = 2**20
"""Written for Mamba2, whose config lacks them."""

_MIN_TIME_STEP: Final = 0.001
"""No metadata say it; all Nemotrons have it."""


def _attention(metadata: Metadata, head_dim: int | None = None) -> dict[str, Any]:
    heads, hidden = metadata.of_some_layers("attention.head_count"), metadata.count("embedding_length")
    own = {} if head_dim is None else {"head_dim": head_dim}
    if head_dim is None and hidden % heads:
        raise NotUnderstood(f"has {heads} heads and {hidden} features, of which no head has a whole number")
    return own | {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.of_some_layers("attention.head_count_kv"),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": any_layer_has(metadata, "attn_q.bias"),
    }


def _mamba(metadata: Metadata, heads: str, size: str, groups: str, states: str, width: str) -> dict[str, Any]:
    """Sizes of Mamba2 layers, by the names of entries."""
    inner, count = metadata.count("ssm.inner_size"), metadata.count("ssm.time_step_rank")
    if inner % count:
        raise NotUnderstood(f"has {inner} features in {count} heads of Mamba2")
    return {
        heads: count,
        size: inner // count,
        groups: metadata.count("ssm.group_count"),
        states: metadata.count("ssm.state_size"),
        width: metadata.count("ssm.conv_kernel"),
    }


def _mamba_of_hybrids(metadata: Metadata) -> dict[str, Any]:
    sizes = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return _mamba(metadata, *sizes) | {
        "mamba_conv_bias": any_layer_has(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": any_layer_has(metadata, "ssm_in.bias"),
    }


def lfm2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Lfm2Config`."""
    found = _attention(metadata)
    found["norm_eps"] = found.pop("rms_norm_eps")
    return found | {
        "intermediate_size": metadata.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": any_layer_has(metadata, "shortconv.conv.bias"),
        "layer_types": kinds_of_layers(metadata, {"shortconv.conv.weight": "conv"}, "full_attention"),
        "rope_parameters": rope_parameters(metadata),
    }


def lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Lfm2MoeConfig`."""
    check_scores(metadata, SIGMOID, may_scale=True)
    found = {name: value for name, value in lfm2(metadata).items() if not name.startswith("block_")}
    return found | {
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": metadata.natural("leading_dense_block_count"),
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "use_expert_bias": any_layer_has(metadata, "exp_probs_b.bias"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
    }


def granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    """Entries of `GraniteMoeHybridConfig`."""
    if metadata.get("rope.scaling.finetuned"):
        raise NotUnderstood("rotates queries and keys beside Mamba2 layers (Bamba), which is not supported")
    found = _attention(metadata)
    experts = metadata.count("expert_count") if metadata.get("expert_count") else 0
    head_dim = metadata.count("embedding_length") // found["num_attention_heads"]
    shared = rows_of(metadata, "ffn_gate_shexp.weight") if experts else rows_of(metadata, "ffn_gate.weight")
    used = {"num_experts_per_tok": metadata.count("expert_used_count")} if experts else {}
    return (
        found
        | _mamba_of_hybrids(metadata)
        | used
        | {
            "layer_types": kinds_of_layers(metadata, {"ssm_in.weight": "mamba"}, "attention"),
            "position_embedding_type": None,
            "mamba_expand": metadata.count("ssm.inner_size") // metadata.count("embedding_length"),
            "intermediate_size": metadata.count("feed_forward_length"),
            "shared_intermediate_size": shared,
            "num_local_experts": experts,
        }
        | granite_scales(metadata, head_dim)
    )


def nemotron_h(metadata: Metadata) -> dict[str, Any]:
    """Entries of `NemotronHConfig`."""
    kinds = {"ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"}
    sizes = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    found = _attention(metadata, metadata.count("attention.key_length"))
    found["layer_norm_epsilon"] = found.pop("rms_norm_eps")
    found |= _mamba(metadata, *sizes) | {
        "layers_block_type": kinds_of_layers(metadata, kinds, "mlp"),
        "time_step_min": _MIN_TIME_STEP,
        "use_bias": any_layer_has(metadata, "ssm_in.bias"),
        "use_conv_bias": any_layer_has(metadata, "ssm_conv1d.bias"),
        "mlp_bias": any_layer_has(metadata, "ffn_up.bias"),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
    }
    if "mlp" in found["layers_block_type"]:
        found["intermediate_size"] = rows_of(metadata, "ffn_up.weight")
    return found | (_routed_nemotron(metadata) if "moe" in found["layers_block_type"] else {})


def _routed_nemotron(metadata: Metadata) -> dict[str, Any]:
    check_scores(metadata, SIGMOID, may_scale=True)
    shared = rows_of(metadata, "ffn_up_shexp.weight")
    inner = metadata.header.tensors[_first(metadata, "ffn_up_exps.weight")].shape[1]
    return groups_of_experts(metadata) | {
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.of_some_layers("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": shared,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
    }


def _first(metadata: Metadata, own: str) -> str:
    """Name of the first such tensor. Raises `NotUnderstood`."""
    names = (f"blk.{index}.{own}" for index in range(metadata.num_own_layers))
    found = next((name for name in names if metadata.has(name)), None)
    if found is None:
        raise NotUnderstood(f"lacks the tensor {own} in all layers")
    return found


def falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """Entries of `FalconH1Config`: what multiplies parts of it, the converter has multiplied the weights by."""
    return (
        _attention(metadata, metadata.count("attention.key_length"))
        | _mamba_of_hybrids(metadata)
        | {
            "intermediate_size": metadata.count("feed_forward_length"),
            "mamba_d_ssm": metadata.count("ssm.inner_size"),
            "mamba_rms_norm": any_layer_has(metadata, "ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "projectors_bias": any_layer_has(metadata, "ssm_out.bias"),
            "mlp_bias": any_layer_has(metadata, "ffn_up.bias"),
            "mlp_multipliers": [1.0] * 2,
            "ssm_multipliers": [1.0] * 5,
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0),
            **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
            **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
            "rope_parameters": rope_parameters(metadata),
        }
    )


def mamba2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Mamba2Config`."""
    length = metadata.count("context_length")
    stated = {} if length == _NO_LENGTH else {"max_position_embeddings": length}
    return (
        stated
        | _mamba(metadata, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
        | {
            "expand": metadata.count("ssm.inner_size") // metadata.count("embedding_length"),
            "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
            "use_bias": any_layer_has(metadata, "ssm_in.bias"),
            "use_conv_bias": any_layer_has(metadata, "ssm_conv1d.bias"),
        }
    )


def qwen_delta_net(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Qwen3_5TextConfig`, and of mixtures."""
    head_dim, values = metadata.count("attention.key_length"), metadata.count("ssm.time_step_rank")
    inner, keys = metadata.count("ssm.inner_size"), metadata.count("ssm.group_count")
    if values % keys or inner % values:
        raise NotUnderstood(f"has {keys} key heads and {values} value heads of {inner} features in all")
    found = _attention(metadata, head_dim) | {
        "layer_types": kinds_of_layers(metadata, {"ssm_a": "linear_attention"}, "full_attention"),
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }
    rotated = metadata.count("rope.dimension_count", head_dim) / head_dim
    found["rope_parameters"] = rope_parameters(metadata) | {"partial_rotary_factor": rotated}
    if not metadata.get("expert_count"):
        return found | {"intermediate_size": metadata.count("feed_forward_length")}
    return found | {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
    }


def model_type_of_latents(metadata: Metadata) -> str:
    """DeepSeek V2 chooses experts by softmax, V3, Kimi K2 and GLM-4.7-Flash by sigmoid scores."""
    chosen = metadata.get("expert_gating_func", SOFTMAX)
    if chosen not in (SOFTMAX, SIGMOID):
        raise NotUnderstood(f"has expert_gating_func {chosen}; only 1 and 2 are supported")
    return "deepseek_v2" if chosen == SOFTMAX else "deepseek_v3"


def deepseek(metadata: Metadata) -> dict[str, Any]:
    """Entries of `DeepseekV2Config` or `DeepseekV3Config`."""
    rope, latent = metadata.count("rope.dimension_count"), metadata.count("attention.kv_lora_rank")
    heads, key = metadata.count("attention.head_count"), metadata.count("attention.key_length_mla")
    query = metadata.count("attention.q_lora_rank") if metadata.get("attention.q_lora_rank") else None
    if metadata.count("attention.key_length") != latent + rope:
        raise NotUnderstood("has keys that are not those of the absorbed form; convert it again")
    found = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": any_layer_has(metadata, "attn_kv_a_mqa.bias"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "q_lora_rank": query,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": metadata.count("attention.value_length_mla"),
        "first_k_dense_replace": metadata.natural("leading_dense_block_count"),
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "n_shared_experts": metadata.count("expert_shared_count"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "rope_parameters": _angles_of_latents(metadata),
    }
    return found | _routers_of_latents(metadata)


def _angles_of_latents(metadata: Metadata) -> dict[str, Any]:
    found, log = rope_parameters(metadata), metadata.get("rope.scaling.yarn_log_multiplier")
    if log is None:
        return found
    weight = round(float(log) / _LOG_OF_YARN, 6)
    return found | {"mscale": weight, "mscale_all_dim": weight}


def _routers_of_latents(metadata: Metadata) -> dict[str, Any]:
    groups = groups_of_experts(metadata)
    if model_type_of_latents(metadata) == "deepseek_v2":
        method = "greedy" if groups["n_group"] == 1 else "group_limited_greedy"
        if metadata.get("expert_weights_norm"):
            raise NotUnderstood("divides the weights of chosen experts by their sum, beside softmax")
        return groups | {"topk_method": method}
    if metadata.get("expert_group_count") is None:
        raise NotUnderstood(
            "lacks the key deepseek2.expert_group_count, which older converters left out; convert it again"
        )
    return groups | {"norm_topk_prob": bool(metadata.get("expert_weights_norm", False)), "rope_interleave": True}
