"""Converter of a model folder (Hugging Face, bf16 safetensors) to a GGUF file of the same bits: llama, qwen2,
hybrids (`llamacpp_hybrids.py`) and Gemma 4 (`llamacpp_gemma4.py`).

    python llamacpp_convert.py MODEL_FOLDER OUT_FILE

Uses the `gguf` package alone, so that llama.cpp's environment needs neither torch nor transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llamacpp_gemma4 import ARCHITECTURE, MODEL_TYPE, add_gemma4_shape, add_gemma4_tensors
from llamacpp_hybrids import HYBRIDS, add_hybrid_shape, add_hybrid_tensors
from llamacpp_parts import add_sizes, add_words, numbers_of, stored_tensors

WHOLE_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def with_neighbouring_pairs(words: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head reordered: Hugging Face keeps the halves of a rotary pair apart, llama's graph side by side."""
    half = words.shape[0] // num_heads // 2
    return words.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(words.shape)


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    words: list[str] = [""] * config["vocab_size"]
    kinds = [gguf.TokenType.NORMAL] * config["vocab_size"]
    for word, token in tokenizer["model"]["vocab"].items():
        words[token] = word
    for added in tokenizer["added_tokens"]:
        words[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensors(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, words in stored_tensors(model / "model.safetensors"):
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            words = with_neighbouring_pairs(words, heads[part])
        if words.ndim == 1:
            writer.add_tensor(gguf_name(name), numbers_of(words))
        else:
            add_words(writer, gguf_name(name), words)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((model / "config.json").read_text())
    architecture, shape, tensors = _parts_of(config["model_type"])
    writer = gguf.GGUFWriter(out, architecture)
    shape(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    tensors(writer, model, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts_of(model_type: str) -> tuple[str, Any, Any]:
    """Architecture in GGUF, and what adds metadata and tensors."""
    if model_type in HYBRIDS:
        return HYBRIDS[model_type], add_hybrid_shape, add_hybrid_tensors
    if model_type == MODEL_TYPE:
        return ARCHITECTURE, add_gemma4_shape, add_gemma4_tensors
    return model_type, add_shape, add_tensors


if __name__ == "__main__":
    main()
