"""GGUF files of Gemma 4, dense and mixtures: metadata as `Gemma4TextConfig`, names of tensors.

Facts: llama.cpp's converter (`Gemma4Model`). Layers without a window have heads of another size. Their rotary angles
are divided by a tensor of factors: 1 for what turns, a very large one for what does not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.formats.gguf_metadata import Metadata, NamedTensor, NotUnderstood
from holdfast.worker.models.formats.gguf_rotary import rotary_factors

_NEVER_TURNED: Final = 1e20
"""Least factor of an angle that stays at zero; llama.cpp's converter writes 1e30."""

OWN_INPUTS: Final = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
"""Tensors of per-layer embeddings, which only small models have."""

PARTS: Final[tuple[Mapping[str, str], ...]] = (
    {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "layer_output_scale.weight": "layer_scalar",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    },
    {"attn_k.weight": "self_attn.k_proj.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"},
    {"attn_v.weight": "self_attn.v_proj.weight"},
    {
        "inp_gate.weight": "per_layer_input_gate.weight",
        "proj.weight": "per_layer_projection.weight",
        "post_norm.weight": "post_per_layer_input_norm.weight",
    },
    {
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_down_exps.weight": "experts.{}.down_proj.weight",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    },
    {"ffn_gate_up_exps.weight": "experts.{}.gate_up_proj.weight"},
    {
        "ffn_gate_exps.weight": "experts.{}.gate_proj.weight",
        "ffn_up_exps.weight": "experts.{}.up_proj.weight",
    },
)


def gate_and_up(tensor: NamedTensor, config: Mapping[str, Any]) -> list[NamedTensor]:
    """Gates of an expert, which lie before its ups."""
    count = tensor.stored.shape[0] // 2
    return [
        replace(tensor, name=tensor.name.replace("gate_up_proj", f"{part}_proj"), first=which * count, count=count)
        for which, part in enumerate(("gate", "up"))
    ]


def gemma4(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Gemma4TextConfig`. Raises `NotUnderstood`."""
    windows = _windows(metadata)
    found = {
        "num_attention_heads": metadata.count("attention.head_count"),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
        "sliding_window": metadata.count("attention.sliding_window"),
        "head_dim": metadata.count("attention.key_length_swa"),
        "global_head_dim": metadata.count("attention.key_length"),
        "attention_k_eq_v": not metadata.has(f"blk.{windows.index(False)}.attn_v.weight"),
        "num_kv_shared_layers": _num_sharing(metadata),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "rope_parameters": _angles(metadata),
    }
    return found | _kv_heads(metadata, windows) | _inner(metadata) | _own_inputs(metadata) | _experts(metadata)


def _num_sharing(metadata: Metadata) -> int:
    """Layers that share the keys and values of others."""
    found = metadata.natural("attention.shared_kv_layers")
    if found > metadata.num_layers:
        raise NotUnderstood(f"has {found} layers that share keys and values, and {metadata.num_layers} layers")
    return found


def _windows(metadata: Metadata) -> list[bool]:
    """Whether each layer has a window; the last one has none."""
    found = metadata.get("attention.sliding_window_pattern")
    if not isinstance(found, list) or len(found) != metadata.num_layers or found[-1]:
        raise NotUnderstood(
            "has gemma4.attention.sliding_window_pattern that is not one entry for each layer, the last false"
        )
    return [bool(one) for one in found]


def _kv_heads(metadata: Metadata, windows: list[bool]) -> dict[str, Any]:
    """KV heads of layers with a window, and of those without one."""
    counts = metadata.get("attention.head_count_kv")
    if not isinstance(counts, list):
        return {"num_key_value_heads": metadata.count("attention.head_count_kv")}
    by_kind = {kind: {one for one, own in zip(counts, windows, strict=False) if own is kind} for kind in (True, False)}
    if len(counts) != len(windows) or any(len(one) > 1 for one in by_kind.values()):
        raise NotUnderstood(f"has gemma4.attention.head_count_kv = {str(counts)[:100]}: must be one number a kind")
    whole = by_kind[False].pop()
    return {"num_key_value_heads": by_kind[True].pop() if by_kind[True] else whole, "num_global_key_value_heads": whole}


def _inner(metadata: Metadata) -> dict[str, Any]:
    """Inner features of MLPs, which may be twice as many in layers that share keys and values."""
    sizes = metadata.get("feed_forward_length")
    if not isinstance(sizes, list) or not sizes:
        return {"intermediate_size": metadata.count("feed_forward_length"), "use_double_wide_mlp": False}
    shared = _num_sharing(metadata)
    if any(type(one) is not int or one <= 0 for one in sizes):
        raise NotUnderstood(f"has gemma4.feed_forward_length = {str(sizes)[:100]}: must be numbers above 0")
    first, is_double = sizes[0], sizes[0] != sizes[-1]
    if sizes != [first] * (len(sizes) - shared) + [first * (1 + is_double)] * shared:
        raise NotUnderstood(f"has gemma4.feed_forward_length = {str(sizes)[:100]}, which no Gemma 4 has")
    return {"intermediate_size": first, "use_double_wide_mlp": is_double}


def _own_inputs(metadata: Metadata) -> dict[str, Any]:
    width, table = metadata.get("embedding_length_per_layer_input") or 0, "per_layer_token_embd.weight"
    if not width or not metadata.has(table):
        return {"hidden_size_per_layer_input": 0}
    rows = metadata.header.tensors[table].shape[0]
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": rows}


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.count("expert_count"),
        "top_k_experts": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def _angles(metadata: Metadata) -> dict[str, Any]:
    factors = rotary_factors(metadata)
    turned = int((factors < _NEVER_TURNED).sum())
    if not (factors[:turned] == 1).all() or 2 * len(factors) != metadata.count("attention.key_length"):
        raise NotUnderstood("has rotary factors (rope_freqs.weight) that are not Gemma 4's")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turned / len(factors),
            "rope_theta": metadata.number("rope.freq_base"),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa")},
    }
