"""Heads of each layer by a Hugging Face config: layers of different kinds may have other numbers of KV heads, and heads
of another size (Gemma 4).
"""

from typing import Any


def layer_config(config: Any, layer: int) -> Any:
    """The config of one layer: the whole model's where all layers are alike."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def num_kv_heads(config: Any, layer: int = 0) -> int:
    """KV heads of a layer, on all ranks together."""
    return int(getattr(layer_config(config, layer), "num_key_value_heads", None) or config.num_attention_heads)


def kv_head_counts(config: Any) -> list[int]:
    """Each number of KV heads that some layer has."""
    if not getattr(config, "is_heterogeneous", False):
        return [num_kv_heads(config)]
    return sorted({num_kv_heads(config, layer) for layer in range(config.num_hidden_layers)})


def head_dim(config: Any, layer: int = 0) -> int:
    """Dimensions of a layer's keys and values."""
    own = getattr(layer_config(config, layer), "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)
