"""Metadata and tensors of Gemma 4 without experts in GGUF files. For `llamacpp_convert.py`."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llamacpp_parts import add_sizes, add_words, numbers_of, stored_tensors

ARCHITECTURE = "gemma4"
MODEL_TYPE = "gemma4_text"
NEVER_TURNED = 1e30
"""What llama.cpp divides an angle by that proportional rotary embedding leaves at zero."""


def add_gemma4_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, width = config["num_kv_shared_layers"], config["intermediate_size"]
    double = 2 if config["use_double_wide_mlp"] else 1
    add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length([width] * (len(windows) - shared) + [width * double] * shared)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _add_heads(writer, config)


def _add_heads(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes and rotary embeddings of heads, which layers of both kinds have of their own."""
    whole, window, rope = _whole_head(config), config["head_dim"], config["rope_parameters"]
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(window)
    writer.add_value_length_swa(window)
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(window)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def _whole_head(config: dict[str, Any]) -> int:
    """Size of a head of layers that attend to all tokens, which versions of transformers write in two ways."""
    if "global_head_dim" in config:
        return int(config["global_head_dim"])
    return int(next(iter(config["per_layer_config"].values()))["head_dim"])


def add_gemma4_tensors(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """By the names of the `gguf` package. Vectors are float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config["num_hidden_layers"])
    for name, words in stored_tensors(model / "model.safetensors"):
        whole = f"{name}.weight" if name.endswith("layer_scalar") else name
        own = names.get_name(whole, try_suffixes=(".weight",))
        assert own is not None, name
        if words.ndim == 1:
            writer.add_tensor(own, numbers_of(words))
        else:
            add_words(writer, own, words)
    half = _whole_head(config) // 2
    turned = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * turned + [NEVER_TURNED] * (half - turned), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
