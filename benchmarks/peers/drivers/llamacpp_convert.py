"""Converter of a model folder (Hugging Face, bf16 safetensors) to a GGUF file of the same bits: llama, qwen2, and the
hybrids lfm2 and qwen3_5_text, of as many key as value heads.

    python llamacpp_convert.py MODEL_FOLDER OUT_FILE

Uses the `gguf` package alone, so that llama.cpp's environment needs neither torch nor transformers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BF16 = gguf.GGMLQuantizationType.BF16
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


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor's name and its 16-bit words."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_size)
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        if facts["dtype"] != "BF16":
            raise ValueError(f"{name} is {facts['dtype']}, not BF16")
        first, end = facts["data_offsets"]
        yield name, np.frombuffer(data[first:end].tobytes(), dtype=np.uint16).reshape(facts["shape"])


HYBRIDS = {"lfm2": "lfm2", "qwen3_5_text": "qwen35"}
"""Architectures of GGUF by `model_type`."""
FULL = "full_attention"


def add_hybrid_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What hybrids have besides, or in another form."""
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "lfm2":
        inner = -(-int(2 * config["intermediate_size"] / 3) // 256) * 256
        writer.add_feed_forward_length(inner)
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if kind == FULL else 0 for kind in config["layer_types"]])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_uint32("lfm2.shortconv.l_cache", config["conv_L_cache"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(turned)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of text all positions are equal
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_uint32("qwen35.full_attention_interval", config["layer_types"].index(FULL) + 1)


def add_hybrid_tensors(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """By the names of the `gguf` package. Norms of Qwen3.5 are stored as what they multiply by, less one."""
    architecture = HYBRIDS[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, words in tensors(model / "model.safetensors"):
        own = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        is_exact = words.ndim == 1 or "conv.weight" in name or "conv1d" in name
        if not is_exact:
            writer.add_tensor(own, np.ascontiguousarray(words).view(np.uint8), raw_dtype=BF16)
            continue
        numbers = (words.astype(np.uint32) << 16).view(np.float32)
        if architecture == "qwen35" and name.endswith("norm.weight") and "linear_attn" not in name:
            numbers = numbers + np.float32(1)
        if name.endswith("A_log"):
            numbers = -np.exp(numbers)
        writer.add_tensor(own, np.ascontiguousarray(numbers.squeeze(1) if numbers.ndim == 3 else numbers))


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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
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
    for name, words in tensors(model / "model.safetensors"):
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            words = with_neighbouring_pairs(words, heads[part])
        if words.ndim == 1:
            writer.add_tensor(gguf_name(name), (words.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(words).view(np.uint8), raw_dtype=BF16)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((model / "config.json").read_text())
    is_hybrid = config["model_type"] in HYBRIDS
    writer = gguf.GGUFWriter(out, HYBRIDS.get(config["model_type"], config["model_type"]))
    (add_hybrid_shape if is_hybrid else add_shape)(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    (add_hybrid_tensors if is_hybrid else add_tensors)(writer, model, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
