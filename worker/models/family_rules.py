"""Rules of families: values of a config that follow from others, and what layers differ in, such as the number and the
size of their KV heads.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from holdfast.worker.executors.layout_arithmetic import QueryScale


def layer_types(kind_of: Callable[[Any, int], bool]) -> Callable[[Any], None]:
    """Derives a missing `layer_types`: whether a layer has a window, by config and index."""

    def derive(config: Any) -> None:
        if config.layer_types is None:
            config.layer_types = [
                "sliding_attention" if kind_of(config, index) else "full_attention"
                for index in range(config.num_hidden_layers)
            ]

    return derive


def full_every(count: int) -> Callable[[Any], None]:
    """Each layer whose number is a multiple of `count` has no window."""
    return layer_types(lambda config, index: bool((index + 1) % count))


def slides_by_pattern(config: Any, index: int) -> bool:
    return bool(config.sliding_window_pattern and (index + 1) % config.sliding_window_pattern)


FULL_BY_PATTERN: Final = layer_types(slides_by_pattern)


def derive_gemma4(config: Any) -> None:
    """Layers without a window have heads of another size, and maybe another number of KV heads."""
    full_every(6)(config)
    config.layer_types = [*config.layer_types[:-1], "full_attention"]
    full = {"head_dim": config.global_head_dim}
    if config.attention_k_eq_v and config.num_global_key_value_heads is not None:
        full["num_key_value_heads"] = config.num_global_key_value_heads
    own = config.per_layer_config
    if own is None:
        own = {str(index): full for index, kind in enumerate(config.layer_types) if kind == "full_attention"}
    first = config.num_hidden_layers - (config.num_kv_shared_layers or 0)
    config.layers_sharing_kv = "|".join(map(str, range(first, config.num_hidden_layers))) or "none"
    heads = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    config.is_heterogeneous = True
    config.per_layer_config = [
        SimpleNamespace(**{**heads, **own.get(str(index), {})}) for index in range(config.num_hidden_layers)
    ]


def shares_kv(config: Any, index: int) -> bool:
    """Whether a layer of Gemma 4 reads the keys and values of another."""
    is_shared: bool = index >= config.num_hidden_layers - (config.num_kv_shared_layers or 0)
    return is_shared


def kv_source_gemma4(config: Any, index: int) -> int | None:
    """The last layer of the same kind with its own keys and values; there is one (`stated_config.py`)."""
    if not shares_kv(config, index):
        return None
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    source: int = len(own) - 1 - own[::-1].index(config.layer_types[index])
    return source


def derive_qwen(kind_of: Callable[[Any, int], bool]) -> Callable[[Any], None]:
    """Windows are off unless config.json sets them on."""

    def derive(config: Any) -> None:
        config.sliding_window = config.sliding_window if config.use_sliding_window else None
        layer_types(lambda config, index: config.sliding_window is not None and kind_of(config, index))(config)

    return derive


def derive_smollm3(config: Any) -> None:
    """Layers without rotary embedding and layer types of SmolLM3, as transformers derives them."""
    if config.no_rope_layers is None:
        interval = config.no_rope_layer_interval
        config.no_rope_layers = [int((index + 1) % interval != 0) for index in range(config.num_hidden_layers)]
    derive_qwen(lambda config, index: not config.no_rope_layers[index])(config)


def derive_lfm2_moe(config: Any) -> None:
    """Fields that LFM2 MoE's configuration leaves out or names otherwise."""
    config.hidden_act, config.head_dim = "silu", None
    config.tie_word_embeddings = config.tie_word_embeddings if config.tie_embedding is None else config.tie_embedding


def derive_lfm2(config: Any) -> None:
    """MLP width and layer types of LFM2, as transformers derives them."""
    derive_lfm2_moe(config)
    inner = config.intermediate_size if config.block_ff_dim is None else config.block_ff_dim
    if config.block_auto_adjust_ff_dim:
        inner, unit = int(config.block_ffn_dim_multiplier * int(2 * inner / 3)), config.block_multiple_of
        inner = -(-inner // unit) * unit
    config.intermediate_size = inner
    if config.layer_types is None:
        attending = range(config.num_hidden_layers) if config.full_attn_idxs is None else config.full_attn_idxs
        config.layer_types = [
            "full_attention" if index in attending else "conv" for index in range(config.num_hidden_layers)
        ]


def short_conv_length(config: Any, num_drafts: int) -> int:
    return int(config.hidden_size) * (int(config.conv_L_cache) - 1 + num_drafts)


def has_window(config: Any, index: int) -> bool:
    return config.sliding_window is not None and config.layer_types[index] == "sliding_attention"


def is_sparse(config: Any, index: int) -> bool:
    """Whether a layer of Qwen's mixtures, by config and index, has experts."""
    return index not in (config.mlp_only_layers or ()) and (index + 1) % config.decoder_sparse_step == 0


def derive_ernie(config: Any) -> None:
    """Replaces Ernie's end index -1 by the last layer's."""
    if config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def is_between(config: Any, index: int) -> bool:
    """Whether a layer of Ernie 4.5 MoE is a mixture of experts."""
    is_within: bool = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    return is_within and (index + 1) % config.moe_layer_interval == 0


def llama4_scale(config: Any) -> QueryScale | None:
    """Scale of queries that grows with the position (Ministral 3, as in Llama 4); None: there is none."""
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScale(beta=float(beta), length=int(length)) if beta else None


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
