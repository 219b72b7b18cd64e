"""Metadata and tensors of hybrids in GGUF files: lfm2, qwen3_5_text, qwen3_next, and granitemoehybrid without experts.
For `llamacpp_convert.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llamacpp_parts import add_sizes, add_words, numbers_of, stored_tensors

HYBRIDS = {
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
}
"""Architectures of GGUF by `model_type`."""
FULL = "full_attention"
EXPERT = ".mlp.experts."


# --- metadata ---


def add_hybrid_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What hybrids have besides, or in another form."""
    architecture = HYBRIDS[config["model_type"]]
    add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config["norm_eps" if architecture == "lfm2" else "rms_norm_eps"])
    if architecture in ("lfm2", "granitehybrid"):
        types = config.get("layer_types") or config["layers_block_type"]
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if kind in (FULL, "attention") else 0 for kind in types])
    {"lfm2": _add_lfm2, "granitehybrid": _add_granite}.get(architecture, _add_qwen)(writer, config)


def _add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_feed_forward_length(-(-int(2 * config["intermediate_size"] / 3) // 256) * 256)
    writer.add_uint32("lfm2.shortconv.l_cache", config["conv_L_cache"])


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(False)  # by which llama.cpp knows that nothing is turned
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])


def _add_qwen(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    architecture, rope = HYBRIDS[config["model_type"]], config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if architecture == "qwen35":
        writer.add_rope_dimension_sections([11, 11, 10, 0])  # of text all positions are equal
    else:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_uint32(f"{architecture}.full_attention_interval", config["layer_types"].index(FULL) + 1)


# --- tensors ---


def add_hybrid_tensors(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """By the names of the `gguf` package."""
    architecture = HYBRIDS[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    stored = _stacked(stored_tensors(model / "model.safetensors"))
    if architecture == "qwen35":
        stored = ((name, _with_value_heads_apart(name, words, config)) for name, words in stored)
    for name, words in (part for one in stored for part in _parts(*one, config)):
        own = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert own is not None or name.startswith("blk."), name
        if _is_exact(name, words):
            writer.add_tensor(own or name, _exact(name, words, architecture, config))
        else:
            add_words(writer, own or name, words)


def _stacked(stored: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """With the weights of a layer's experts, which lie one by one, as one [experts, out, in]."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, words in stored:
        before, found, rest = name.partition(EXPERT)
        expert, dot, part = rest.partition(".")
        if found and dot and expert.isdigit():
            experts.setdefault(f"{before}{EXPERT}{part}", {})[int(expert)] = words
        else:
            yield name, words
    for name, own in experts.items():
        yield name, np.stack([own[expert] for expert in sorted(own)])


def _with_value_heads_apart(name: str, words: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Value heads of Gated DeltaNet as llama.cpp has them: the first of each key head, then the second ones."""
    module, _, part = name.rpartition("linear_attn.")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if not module or part == "norm.weight" or keys == values:
        return words
    if part == "out_proj.weight":
        return _turned(words.T, keys, values).T
    first = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    return np.concatenate((words[:first], _turned(words[first:], keys, values)))


def _turned(rows: np.ndarray, keys: int, values: int) -> np.ndarray:
    return rows.reshape(keys, values // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _parts(name: str, words: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that one is in a GGUF file, by Hugging Face's names or by the file's."""
    block = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(words, 2)
        yield from ((f"{block}ffn_gate.weight", gate), (f"{block}ffn_up.weight", up))
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}ffn_down.weight", words
    elif name.endswith("experts.gate_up_proj"):
        gate, up = np.split(words, 2, axis=1)
        yield from ((f"{block}ffn_gate_exps.weight", gate), (f"{block}ffn_up_exps.weight", up))
    elif name.endswith("experts.down_proj"):
        yield f"{block}ffn_down_exps.weight", words
    elif "in_proj_qkvz" in name:
        key, heads = config["linear_key_head_dim"], config["linear_num_key_heads"]
        values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        by_head = words.reshape(heads, -1, words.shape[-1])
        *qkv, z = (
            part.reshape(-1, words.shape[-1]) for part in np.split(by_head, [key, 2 * key, 2 * key + values], axis=1)
        )
        yield from ((f"{block}attn_qkv.weight", np.concatenate(qkv)), (f"{block}attn_gate.weight", z))
    else:
        yield name, words


def _is_exact(name: str, words: np.ndarray) -> bool:
    """Whether a tensor is stored in float32."""
    return (
        words.ndim == 1 or "conv.weight" in name or "conv1d" in name or name.endswith((".gate.weight", "_gate.weight"))
    )


def _exact(name: str, words: np.ndarray, architecture: str, config: dict[str, Any]) -> np.ndarray:
    """Numbers as llama.cpp's converter stores them: norms of Qwen as what they multiply by, decays as such."""
    numbers = numbers_of(words)
    if architecture.startswith("qwen3") and name.endswith("norm.weight") and "linear_attn" not in name:
        numbers = numbers + np.float32(1)
    if name.endswith("A_log"):
        numbers = -np.exp(numbers)
    if architecture == "granitehybrid":
        if name.endswith((".A_log", ".D")):
            numbers = numbers[:, None]
        elif name.endswith("mamba.norm.weight"):
            numbers = numbers.reshape(config["mamba_n_groups"], -1)
    if name.endswith("shared_expert_gate.weight"):
        numbers = numbers[0]
    return np.ascontiguousarray(numbers.squeeze(1) if numbers.ndim == 3 else numbers)
