"""GGUF files of tiny models whose layers differ, or keep states or latents, as llama.cpp's converter changes them.

Names of tensors are the `gguf` package's own mapping; nothing here is Holdfast's.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.families import save_tiny_model
from tests.parity.hybrids import save_hybrid
from tests.worker.models.formats.gguf_conversions import stacked
from tests.worker.models.formats.gguf_files import (
    Written,
    add_field,
    add_tensor,
    architecture_number,
    kind_of,
    permuted,
    quantized,
    tokenizer_fields,
)
from tests.worker.models.formats.gguf_hybrid_metadata import Metadata

CONVERTED: dict[str, tuple[str, str]] = {
    "lfm2": ("lfm2", "attention last"),
    "lfm2, odd": ("lfm2", "odd channels"),
    "lfm2, a mixture": ("lfm2moe", "conv, mixture"),
    "qwen3.5": ("qwen35", "dense"),
    "qwen3.5, tied": ("qwen35", "state last"),
    "qwen3.5, a mixture": ("qwen35moe", "mixture"),
    "qwen3-next": ("qwen3next", "by key heads, mixture"),
    "granite, dense": ("granitehybrid", "granite, dense"),
    "granite, a mixture": ("granitehybrid", "granite, mixture"),
    "nemotron": ("nemotron_h_moe", "nemotron"),
    "nemotron, attention last": ("nemotron_h", "nemotron, attention last"),
    "falcon": ("falcon-h1", "falcon"),
    "falcon, norms": ("falcon-h1", "falcon, norms"),
    "mamba2": ("mamba2", "Mamba2 alone"),
    "mamba2, biases": ("mamba2", "Mamba2 alone, biases"),
    "deepseek v2": ("deepseek2", "deepseek_v2"),
    "deepseek v3": ("deepseek2", "deepseek_v3"),
    "glm-4.7-flash": ("deepseek2", "glm4_moe_lite"),
    "gemma4, shared keys": ("gemma4", "gemma4_text, shared keys"),
    "gemma4, a mixture": ("gemma4", "gemma4_text"),
}
"""By name: GGUF's architecture, and the pattern or family that is converted."""

EXACT = ("ffn_gate_inp", "conv", "ssm_dt", "exp_probs_b", "norm")
"""Parts of names of tensors that no converter quantizes."""

INNER = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
HEADS = ("num_attention_heads", "mamba_n_heads", "mamba_num_heads", "num_heads", "linear_num_key_heads")
GROUPS = ("n_groups", "mamba_n_groups")


def sizes_of_blocks(own: dict[str, Any], unit: int, num_heads: int) -> dict[str, Any]:
    """Of a tiny model with this config: matrices have whole blocks, and each slice of a sum a `unit` or more."""
    hidden, is_latent = num_heads * unit, "kv_lora_rank" in own
    is_grouped = any(own.get(name, 1) > 1 for name in GROUPS)
    found = {
        "hidden_size": hidden,
        "head_dim": 2 * unit if "num_heads" in own else unit,  # of Mamba2 alone, whose layers are twice as wide
        "query_pre_attn_scalar": unit,
        **dict.fromkeys(INNER, hidden),
        **dict.fromkeys(HEADS, num_heads),
        **dict.fromkeys(GROUPS, num_heads if is_grouped else 1),
        "num_key_value_heads": num_heads // 2 if not is_latent and num_heads % 2 == 0 else num_heads,
        "linear_num_value_heads": 2 * num_heads,
        "mamba_d_ssm": 2 * hidden,
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 2 * unit),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), unit),
    }
    found = {name: value for name, value in found.items() if own.get(name) not in (None, ...)}
    return found | ({"block_auto_adjust_ff_dim": False} if "block_multiple_of" in own else {})


Named = Iterator[tuple[str, Tensor]]


def write_hybrid(
    name: str,
    where: Path,
    kind: str = "F32",
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    fields: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Written:
    """The folder is the model that was converted: of a quantized file its numbers are others. `change` has each tensor,
    by GGUF's name, before it is written. `fields`: metadata in place of the converter's.
    """
    architecture, pattern = CONVERTED[name]
    source = where / "folder"
    if architecture in ("deepseek2", "gemma4"):
        save_tiny_model(pattern, source, **changes)
    else:
        least = {"time_step_min": 0.001} if architecture.startswith("nemotron") else {}  # which no metadata say
        save_hybrid(source, pattern, **least, **changes)
    config = json.loads((source / "config.json").read_text())
    converter = Converter(architecture, config)
    writer = gguf.GGUFWriter(where / "model.gguf", architecture)
    for key, value in {**converter.metadata(), **tokenizer_fields(), **(fields or {})}.items():
        add_field(writer, key, value)
    for hf_name, tensor in stacked(load_file(source / "model.safetensors")).items():
        for own, converted in converter.tensors(hf_name, tensor.float()):
            plain = change(own, converted).contiguous().numpy().astype(np.float32)
            used = kind if is_quantized(own, plain.shape, kind) else "F32"
            rows = plain.reshape(-1, plain.shape[-1]) if plain.ndim == 3 else plain
            stored, _ = quantized(rows, used)
            add_tensor(writer, own, stored.reshape(*plain.shape[:-1], -1), used)
    for own, tensor in converter.extra():
        add_tensor(writer, own, tensor.numpy(), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(where / "model.gguf", source)


def is_quantized(own: str, shape: tuple[int, ...], kind: str) -> bool:
    """Whether a tensor is, in a file of this type."""
    fits = shape[-1] % gguf.GGML_QUANT_SIZES[kind_of(kind)][0] == 0
    return len(shape) > 1 and fits and not any(part in own for part in EXACT)


def in_blocks(own: str, tensor: Tensor, kind: str = "Q8_0") -> Tensor:
    """The numbers that a tensor has in a file of this type."""
    if not is_quantized(own, tuple(tensor.shape), kind):
        return tensor
    rows = tensor.contiguous().numpy().reshape(-1, tensor.shape[-1])
    return torch.from_numpy(quantized(rows, kind)[1]).reshape(tensor.shape)


class Converter(Metadata):
    """Rules of llama.cpp's converter for the tensors of one model."""

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        super().__init__(architecture, config)
        self.names = gguf.get_tensor_name_map(architecture_number(architecture), self.num_layers)

    def tensors(self, name: str, tensor: Tensor) -> Named:
        rules = {
            "lfm2": self._lfm2,
            "lfm2moe": self._lfm2,
            "qwen35": self._qwen,
            "qwen35moe": self._qwen,
            "qwen3next": self._qwen,
            "deepseek2": self._deepseek,
            "gemma4": self._gemma4,
        }
        yield from rules.get(self.architecture, self._mamba)(name, tensor)

    def extra(self) -> Named:
        """Tensors that the folder has not: Gemma 4's factors of rotary angles."""
        if self.architecture == "gemma4":
            half = next(iter(self.config["per_layer_config"].values()))["head_dim"] // 2
            turned = int(half * self.config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
            yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (half - turned))

    def _own(self, name: str) -> str:
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None and self.architecture.startswith("nemotron"):
            found = self.names.get_name(name.replace("model.", "backbone.", 1), try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    def _lfm2(self, name: str, tensor: Tensor) -> Named:
        name = f"{name}.bias" if name.endswith("expert_bias") else name
        name = name.removeprefix("model.") if ".experts." in name else name
        yield self._own(name), tensor.squeeze(1) if "conv.conv.weight" in name else tensor

    # --- Mamba2 ---

    def _mamba(self, name: str, tensor: Tensor) -> Named:
        config = self.config
        if self.architecture == "falcon-h1":
            tensor = self._multiplied(name, tensor)
        if self.architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{part}." in name:
                    tensor = torch.from_numpy(permuted(tensor.numpy(), config[heads]))
        if "conv1d.weight" in name:
            tensor = tensor.squeeze(1)
        elif name.endswith((".A_log", ".D")):
            tensor = (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.reshape(self._groups, -1)
        if "block_sparse_moe.input_linear" in name or "shared_mlp.input_linear" in name:
            ends = ("ffn_gate_exps", "ffn_up_exps") if "block_sparse" in name else self._shared("gate", "up")
            block = re.search(r"layers\.(\d+)\.", name)[1]
            yield from zip((f"blk.{block}.{end}.weight" for end in ends), tensor.chunk(2, -2), strict=True)
        elif "shared_mlp.output_linear" in name:
            block = re.search(r"layers\.(\d+)\.", name)[1]
            yield f"blk.{block}.{self._shared('down')[0]}.weight", tensor
        elif "mixer.experts." in name:
            block, part = re.search(r"layers\.(\d+)\.mixer\.experts\.(up|down)_proj", name).groups()
            yield f"blk.{block}.ffn_{part}_exps.weight", tensor
        else:
            yield self._own(name), tensor

    def _shared(self, *parts: str) -> list[str]:
        return [f"ffn_{part}{'_shexp' if self.config.get('num_local_experts') else ''}" for part in parts]

    def _multiplied(self, name: str, tensor: Tensor) -> Tensor:
        """What Falcon-H1's config multiplies parts by."""
        config = self.config
        factors = {
            "down_proj": config["mlp_multipliers"][1],
            "gate_proj": config["mlp_multipliers"][0],
            "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
            "q_proj": config["attention_in_multiplier"],
            "v_proj": config["attention_in_multiplier"],
            "o_proj": config["attention_out_multiplier"],
            "out_proj": config["ssm_out_multiplier"],
            "lm_head": config["lm_head_multiplier"],
            "embed_tokens": config["embedding_multiplier"],
        }
        module = name.split(".")[-2]
        if module != "in_proj":
            return tensor * factors.get(module, 1.0)
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split([inner, inner, keys, keys, config["mamba_n_heads"]])
        return (
            torch.cat([a * b for a, b in zip(parts, config["ssm_multipliers"], strict=True)])
            * config["ssm_in_multiplier"]
        )

    # --- Gated DeltaNet ---

    def _qwen(self, name: str, tensor: Tensor) -> Named:
        if "conv1d" in name:
            tensor = tensor.squeeze(1)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if self.architecture != "qwen3next":
            tensor = self._tiled(name, tensor)
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        if "in_proj_qkvz" in name:
            block = re.search(r"layers\.(\d+)\.", name)[1]
            q, k, v, z = self._by_kind(tensor)
            yield f"blk.{block}.attn_qkv.weight", torch.cat([q, k, v])
            yield f"blk.{block}.attn_gate.weight", z
        else:
            yield self._own(name), tensor

    def _by_kind(self, tensor: Tensor) -> list[Tensor]:
        config = self.config
        heads, key, value = (config[f"linear_{one}"] for one in ("num_key_heads", "key_head_dim", "value_head_dim"))
        group = config["linear_num_value_heads"] // heads * value
        parts = tensor.unflatten(0, (heads, -1)).split([key, key, group, group], 1)
        return [part.flatten(0, 1) for part in parts]

    def _tiled(self, name: str, tensor: Tensor) -> Tensor:
        """Value heads: first those of all key heads, then the second ones."""
        config = self.config
        heads, value = config["linear_num_key_heads"], config["linear_value_head_dim"]
        keys = 2 * heads * config["linear_key_head_dim"]

        def tiled(rows: Tensor, inner: int) -> Tensor:
            return rows.unflatten(0, (heads, -1, inner)).transpose(0, 1).flatten(0, 2)

        if "linear_attn.out_proj" in name:
            return tiled(tensor.T, value).T
        if "in_proj_qkv" in name or "conv1d" in name:
            return torch.cat([tensor[:keys], tiled(tensor[keys:], value)])
        inner = {"in_proj_z": value, "in_proj_a": 1, "in_proj_b": 1, "A_log": 1, "dt_bias": 1}
        found = next((size for part, size in inner.items() if part in name and "linear_attn" in name), None)
        return tensor if found is None else tiled(tensor, found)

    # --- Gemma 4 ---

    def _gemma4(self, name: str, tensor: Tensor) -> Named:
        scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
        block = re.search(r"layers\.(\d+)\.(.*)", name)
        if block is not None and block[2] in scales:
            yield f"blk.{block[1]}.{scales[block[2]]}", tensor
        else:
            yield self._own(name if name.endswith(".weight") else f"{name}.weight"), tensor

    # --- latents ---

    def _deepseek(self, name: str, tensor: Tensor) -> Named:
        if "kv_b_proj" not in name:
            yield self._own(name), tensor
            return
        config = self.config
        rows = tensor.unflatten(0, (config["num_attention_heads"], -1))
        keys, values = rows.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        yield self._own(name.replace("kv_b_proj", "k_b_proj")), keys.transpose(1, 2)
        yield self._own(name.replace("kv_b_proj", "v_b_proj")), values
