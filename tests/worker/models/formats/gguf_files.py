"""Synthetic GGUF files of tiny models, written as llama.cpp's converter does, and what they are dequantized.

Names of tensors are the `gguf` package's own mapping, quantization is the package's; nothing here is Holdfast's.
"""

import json
import re
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

ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
"""GGUF's names of families."""

PERMUTED = ("llama", "granite", "smollm3")
ADDED_TO = ("gemma", "gemma2", "gemma3")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")

TURNS: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_size": 64, "head_dim": 32},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 4, "layer_types": None},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention"],
    },
    "granite": {"attention_multiplier": 0.3},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5},
}
"""What is changed of the tiny models, beside `SIZES`."""

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
    dtype: torch.dtype | None = None,
    fields: Mapping[str, Any] | None = None,
    change: Callable[[str, NDArray[Any]], NDArray[Any]] = lambda name, stored: stored,
    others: Mapping[str, str] | None = None,
    **changes: Any,
) -> Written:
    """A tiny model with its matrices in a type of blocks, and in `dtype` in the folder beside it. `parts`: tensors of a
    part of a split file. `unpermuted`: a converter's mistake. `factors`: of Llama 3's rotary frequencies. `change`
    has the bytes of a tensor, by GGUF's name, before they are written. `others`: types of some matrices, by a part of
    their names.
    """
    source = save_tiny_model(family, where / "source", **{**SIZES, **TURNS.get(family, {}), **changes})
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[family]
    written = Written(where / name, where / "folder")
    writer = gguf.GGUFWriter(written.file, architecture, split_max_tensors=parts)
    for key, value in {**metadata_of(architecture, config), **tokenizer_fields(), **(fields or {})}.items():
        add_field(writer, key, value)
    if factors:
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    names = gguf.get_tensor_name_map(architecture_number(architecture), config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for hf_name, tensor in stacked(load_file(source / "model.safetensors")).items():
        own = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert own is not None, hf_name
        is_added_to = architecture in ADDED_TO and own.endswith("norm.weight")
        plain = tensor.float().numpy() + (1.0 if is_added_to else 0.0)
        is_matrix = plain.ndim > 1 and "ffn_gate_inp" not in own  # routers stay
        own_kind = next((other for part, other in (others or {}).items() if part in own), kind)
        used = own_kind if is_matrix and plain.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of(own_kind)][0] == 0 else "F32"
        rows = plain.reshape(-1, plain.shape[-1]) if plain.ndim == 3 else plain
        stored, numbers = quantized(rows.astype(np.float32), used, seed=len(written.numbers))
        stored, numbers = stored.reshape(*plain.shape[:-1], -1), numbers.reshape(plain.shape)
        numbers = torch.from_numpy(numbers - (1.0 if is_added_to else 0.0))
        written.numbers |= single(hf_name, numbers)
        count = heads.get(hf_name.split(".")[-2])
        if architecture in PERMUTED and count and not unpermuted:
            stored = permuted(stored, count)
        add_tensor(writer, own, change(own, stored), used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_folder(written, config, dtype or {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16))
    return written


_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the tensors of experts that lie one by one as one [experts, out, in]."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (one := _ONE_EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(one[1] + one[3], {})[int(one[2])] = tensor
    return found | {name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}


def single(name: str, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """The other way round."""
    if numbers.dim() < 3:
        return {name: numbers}
    return {name.replace(".experts.", f".experts.{number}."): one for number, one in enumerate(numbers)}


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


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """As the converter writes it."""
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
    }
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if architecture in PERMUTED or architecture == "phi3":
        found["rope.dimension_count"] = head_dim
    if architecture in (*ADDED_TO, "qwen3", "qwen3moe"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if count := config.get("num_experts") or config.get("num_local_experts"):
        found |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "qwen2moe":
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if architecture == "granite":
        found |= {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    if architecture in ("gemma2", "gemma3"):
        found["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        found |= {
            "attn_logit_softcapping": float(config["attn_logit_softcapping"]),
            "final_logit_softcapping": float(config["final_logit_softcapping"]),
        }
    if rope.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {f"{architecture}.{key}": value for key, value in found.items()}


def save_folder(written: Written, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """The file's numbers as a Hugging Face checkpoint, with the tokenizer beside them left out."""
    written.folder.mkdir()
    tensors = {name: numbers.to(dtype).contiguous() for name, numbers in written.numbers.items()}
    save_file(tensors, written.folder / "model.safetensors", {"format": "pt"})
    changed = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (written.folder / "config.json").write_text(json.dumps(changed))
