"""Synthetic GGUF files of tiny models, written as llama.cpp's converter does, and what they are dequantized.

Names of tensors are the `gguf` package's own mapping, quantization is the package's; nothing here is Holdfast's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.parity.families import save_tiny_model
from tests.worker.models.formats.gguf_conversions import apart, names_of, rule_of, single, stacked, together
from tests.worker.models.formats.gguf_metadata import ADDED_TO, PERMUTED, metadata_of

ARCHITECTURES = {
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama": "llama",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""GGUF's names of families."""

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")

_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
TURNS: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "cohere2": _WINDOWS,
    "ernie4_5_moe": {"moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "exaone4": _WINDOWS,
    "gemma": {"hidden_size": 64, "head_dim": 32},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 4, "layer_types": None},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention"],
    },
    "glm4": {"attention_bias": True},
    "glm4_moe": {"moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {"head_dim": ...},
    "gpt_oss": {
        "intermediate_size": 64,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "granite": {"attention_multiplier": 0.3},
    "granitemoe": {"intermediate_size": 32, "attention_multiplier": 0.3},
    "hunyuan_v1_moe": {"intermediate_size": 64},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "minimax_m2": {"intermediate_size": 32},
    "ministral3": {
        "rope_parameters": {
            **_YARN,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nemotron": {"head_dim": 16},
    "olmo": {"clip_qkv": None, "head_dim": ...},
    "olmo3": _WINDOWS,
    "olmoe": {"intermediate_size": 32, "head_dim": ...},
    "phi": {"head_dim": ...},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "head_dim": ...},
    "starcoder2": {"sliding_window": 4, "head_dim": ...},
}
"""What is changed of the tiny models, beside `SIZES`."""

ODD = ("x", "", -1, 0, 1.5, True, 2**40, float("nan"), [], [1, "x"], [0, 0, 0])
"""Values that no key of a file should have."""

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 126}


def alphabet() -> list[str]:
    """How byte-level vocabularies write the bytes, as GPT-2 does, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


TOKENS = [*alphabet()[: 126 - 6], "Ġt", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def tokenizer_fields(tokens: list[str] = TOKENS) -> dict[str, Any]:
    ids = {text: number for number, text in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text.startswith("<") and len(text) > 1 else 1 for text in tokens],
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": ids["<s>"],
        "tokenizer.ggml.eos_token_id": ids["</s>"],
        "tokenizer.ggml.unknown_token_id": ids["<unk>"],
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


@dataclass
class Written:
    """A GGUF file, and the folder of what is in it."""

    file: Path
    folder: Path
    """A Hugging Face folder with the file's numbers, in bfloat16 unless all are floats of another type."""
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    """By Hugging Face's names, in float32: before they are rounded."""


def write_model(
    family: str,
    where: Path,
    kind: str = "F32",
    *,
    name: str = "model.gguf",
    parts: int = 0,
    unpermuted: bool = False,
    factors: bool = False,
    fused: bool = False,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    fields: Mapping[str, Any] | None = None,
    change: Callable[[str, NDArray[Any]], NDArray[Any]] = lambda name, stored: stored,
    others: Mapping[str, str] | None = None,
    **changes: Any,
) -> Written:
    """A tiny model with its matrices in a type of blocks, and in `dtype` in the folder beside it.

    `parts`: tensors of a part of a split file. `unpermuted`: a converter's mistake. `factors`: of Llama 3's rotary
    frequencies. `fused`: queries, keys and values are one tensor. `architecture`: GGUF's name, if it is
    another one of the family. `change` has the bytes of a tensor, by GGUF's name,
    before they are written. `others`: types of some matrices, by a part of their names.
    """
    source = save_tiny_model(family, where / "source", **{**SIZES, **TURNS.get(family, {}), **changes})
    config = json.loads((source / "config.json").read_text())
    architecture = architecture or ARCHITECTURES[family]
    written = Written(where / name, where / "folder")
    writer = gguf.GGUFWriter(written.file, architecture, split_max_tensors=parts)
    for key, value in {**metadata_of(architecture, config), **tokenizer_fields(), **(fields or {})}.items():
        add_field(writer, key, value)
    if factors:
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    names = gguf.get_tensor_name_map(architecture_number(architecture), config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    tensors = stacked(load_file(source / "model.safetensors"))
    for hf_name, tensor in (together(tensors) if fused else tensors).items():
        rule = rule_of(architecture, config, hf_name)
        count = 0 if unpermuted or architecture not in PERMUTED else heads.get(hf_name.split(".")[-2])
        found = []
        for own, part in zip(rule.owns or (names_of(names, hf_name),), rule.split(tensor.float()), strict=True):
            own_kind = next((other for one, other in (others or {}).items() if one in own), kind)
            added = 1.0 if architecture in ADDED_TO and own.endswith("norm.weight") else 0.0
            seed = len(written.numbers) + len(found)
            stored, numbers, used = stored_part(own, part.contiguous().numpy() + added, own_kind, seed)
            found.append(torch.from_numpy(numbers - added))
            add_tensor(writer, own, change(own, permuted(stored, count) if count else stored), used)
        written.numbers |= single(hf_name, rule.join(found))
    written.numbers = apart(written.numbers, config) if fused else written.numbers
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_folder(written, config, dtype or {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16))
    return written


def stored_part(
    own: str, plain: NDArray[Any], kind: str, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], str]:
    """Bytes of a tensor, the numbers that they stand for, and its type: norms, biases and routers stay floats."""
    is_matrix = plain.ndim > 1 and not any(one in own for one in ("ffn_gate_inp", "norm", ".bias"))
    fits = is_matrix and plain.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of(kind)][0] == 0
    used = kind if fits else "F32"
    rows = plain.reshape(-1, plain.shape[-1]) if plain.ndim == 3 else plain
    stored, numbers = quantized(rows.astype(np.float32), used, seed=seed)
    return stored.reshape(*plain.shape[:-1], -1), numbers.reshape(plain.shape), used


def llama3_factors(config: Mapping[str, Any]) -> NDArray[np.float32]:
    """What llama.cpp's converter makes of a config."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)):
        wavelength = 2 * np.pi / float(frequency)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def quantized(numbers: NDArray[np.float32], kind: str, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows of bytes, and the numbers that they stand for. Of types that the package does not write, random codes."""
    if kind == "F32":
        return numbers.view(np.uint8).reshape(*numbers.shape[:-1], -1), numbers
    if kind in K_KINDS:
        stored = random_blocks(kind, numbers.shape, seed)
    else:
        stored = gguf.quantize(numbers, kind_of(kind)).view(np.uint8)
        stored = stored.reshape(len(numbers), -1)
    if kind == "F16":
        return stored, stored.view(np.float16).astype(np.float32)
    return stored, gguf.dequantize(stored, kind_of(kind)).reshape(numbers.shape)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """With scales that make small numbers."""
    generator = np.random.default_rng(seed)
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    count = int(np.prod(shape)) // values
    blocks = generator.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    scales = (0.0001 + 0.0003 * generator.random((count, 2))).astype(np.float16)
    scales[:, 1] *= 8  # of the minima, so that numbers are on both sides of zero
    if kind == "Q6_K":
        blocks[:, 208:] = scales[:, :1].view(np.uint8)
    else:
        blocks[:, :4] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def permuted(stored: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows in the order of llama.cpp's rotation."""
    shape = stored.shape if stored.ndim > 1 else (len(stored) // 4, 4)  # a bias: four bytes a row
    rows = stored.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(stored.shape))


def add_tensor(writer: gguf.GGUFWriter, name: str, stored: NDArray[Any], kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, stored.view(np.float32))
    elif kind == "F16":
        writer.add_tensor(name, stored.view(np.float16))
    else:
        writer.add_tensor(name, stored, raw_dtype=kind_of(kind))


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def architecture_number(name: str) -> Any:
    return next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def save_folder(written: Written, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """The file's numbers as a Hugging Face checkpoint, with the tokenizer beside them left out."""
    written.folder.mkdir()
    tensors = {name: _rounded(name, numbers, dtype).contiguous() for name, numbers in written.numbers.items()}
    save_file(tensors, written.folder / "model.safetensors", {"format": "pt"})
    changed = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (written.folder / "config.json").write_text(json.dumps(changed))


_EXACT = ("e_score_correction_bias", "mlp.gate.")
"""Parts of names of tensors that mixtures keep in float32."""


def _rounded(name: str, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return numbers if any(part in name for part in _EXACT) else numbers.to(dtype)
