"""Entries of Hugging Face configs that many architectures of GGUF files have, from a file's metadata. All raise
`NotUnderstood`.
"""

from typing import Any

from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood
from holdfast.worker.models.formats.gguf_rotary import rope_parameters


def kinds_of_layers(metadata: Metadata, kinds: dict[str, str], usual: str) -> list[str]:
    """Kind of each layer, by a tensor that only layers of that kind have."""
    return [
        next((kind for own, kind in kinds.items() if metadata.has(f"blk.{index}.{own}")), usual)
        for index in range(metadata.num_own_layers)
    ]


def any_layer_has(metadata: Metadata, own: str) -> bool:
    """Whether a layer has such a tensor."""
    return any(metadata.has(f"blk.{index}.{own}") for index in range(metadata.num_own_layers))


def rows_of(metadata: Metadata, own: str) -> int:
    """Rows of a tensor in the first layer that has it; 0 if no layer has."""
    names = (f"blk.{index}.{own}" for index in range(metadata.num_own_layers))
    found = next((metadata.header.tensors[name].shape for name in names if metadata.has(name)), (0,))
    return found[0]


def rms(metadata: Metadata) -> dict[str, Any]:
    """Epsilon of RMS norms."""
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def layer_norm(metadata: Metadata, entry: str = "layer_norm_eps") -> dict[str, Any]:
    """Epsilon of layer norms, by the name of its entry."""
    return {entry: metadata.number("attention.layer_norm_epsilon")}


def attention_bias(metadata: Metadata) -> dict[str, Any]:
    """Whether queries, keys and values have biases."""
    return {"attention_bias": any_layer_has(metadata, "attn_q.bias")}


def biases(metadata: Metadata) -> dict[str, Any]:
    """Whether attention and MLPs have biases."""
    return attention_bias(metadata) | {"mlp_bias": any_layer_has(metadata, "ffn_up.bias")}


def sizes(metadata: Metadata, *, is_paired: bool = False, is_partial: bool = False) -> dict[str, Any]:
    """Sizes of attention and MLPs, and rotary angles. `is_paired`: the rotated dimensions are the whole head, which
    they give where no other length is written. `is_partial`: they may be a part of it.
    """
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    rotated = metadata.natural("rope.dimension_count")
    head_dim = metadata.natural("attention.key_length") or (rotated if is_paired else 0)
    if not head_dim and hidden % heads:
        raise NotUnderstood(f"has {heads} heads and {hidden} features, of which no head has a whole number")
    head_dim = head_dim or hidden // heads
    rotated = rotated or head_dim
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise NotUnderstood("has keys and values of different lengths")
    if rotated > head_dim or (rotated < head_dim and not is_partial):
        raise NotUnderstood(f"rotates {rotated} of {head_dim} dimensions of a head")
    rope = rope_parameters(metadata)
    if is_partial:
        rope |= {"partial_rotary_factor": rotated / head_dim}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.count("feed_forward_length"),
        "max_position_embeddings": metadata.count("context_length"),
        "rope_parameters": rope,
    }


def usual(metadata: Metadata) -> dict[str, Any]:
    """Sizes, and RMS norms."""
    return sizes(metadata) | rms(metadata)


def usual_paired(metadata: Metadata) -> dict[str, Any]:
    """Likewise, of rows that lie as llama.cpp rotates them."""
    return sizes(metadata, is_paired=True) | rms(metadata)


def windows(metadata: Metadata, period: int) -> dict[str, Any]:
    """Which layers attend to a window: those that the file lists, or all but one of each `period`."""
    count, stated = metadata.num_own_layers, metadata.get("attention.sliding_window_pattern")
    if not metadata.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * count}
    found = stated if isinstance(stated, list) else [(index + 1) % period != 0 for index in range(count)]
    if len(found) != count:
        raise NotUnderstood(f"has a sliding_window_pattern of {len(found)} entries, and {count} layers")
    return {
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in found],
    }


def granite_scales(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Factors of Granite's parts."""
    return {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }
