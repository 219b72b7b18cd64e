"""GGUF files of tiny models whose layers keep states or latents, changed as llama.cpp's converter changes them.

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
from tests.worker.models.gguf.files import (
    Written,
    add_field,
    add_tensor,
    architecture_number,
    permuted,
    quantized,
    stacked,
    tokenizer_fields,
)

CONVERTED: dict[str, tuple[str, str]] = {
    "lfm2": ("lfm2", "attention last"),
    "lfm2, odd": ("lfm2", "odd channels"),
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
}
"""By name: GGUF's architecture, and the pattern or family that is converted."""

EXACT = ("ffn_gate_inp", "conv", "ssm_a", "ssm_d", "ssm_dt", "exp_probs_b", "norm")
"""Parts of names of tensors that no converter quantizes."""

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
    if architecture == "deepseek2":
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
            used = kind if is_quantized(own, plain.shape) else "F32"
            rows = plain.reshape(-1, plain.shape[-1]) if plain.ndim == 3 else plain
            stored, _ = quantized(rows, used)
            add_tensor(writer, own, stored.reshape(*plain.shape[:-1], -1), used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(where / "model.gguf", source)


def is_quantized(own: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is, of a file with blocks of 32."""
    return len(shape) > 1 and shape[-1] % 32 == 0 and not any(part in own for part in EXACT)


def in_blocks(own: str, tensor: Tensor) -> Tensor:
    """The numbers that a tensor has in blocks of Q8_0."""
    if not is_quantized(own, tuple(tensor.shape)):
        return tensor
    rows = tensor.contiguous().numpy().reshape(-1, tensor.shape[-1])
    return torch.from_numpy(quantized(rows, "Q8_0")[1]).reshape(tensor.shape)


class Converter:
    """Rules of llama.cpp's converter for one model."""

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self.architecture, self.config = architecture, config
        self.num_layers: int = config.get("num_hidden_layers") or len(config["layers_block_type"])
        self.names = gguf.get_tensor_name_map(architecture_number(architecture), self.num_layers)

    def tensors(self, name: str, tensor: Tensor) -> Named:
        rules = {
            "lfm2": self._lfm2,
            "qwen35": self._qwen,
            "qwen35moe": self._qwen,
            "qwen3next": self._qwen,
            "deepseek2": self._deepseek,
        }
        yield from rules.get(self.architecture, self._mamba)(name, tensor)

    def _own(self, name: str) -> str:
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None and self.architecture.startswith("nemotron"):
            found = self.names.get_name(name.replace("model.", "backbone.", 1), try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    def _lfm2(self, name: str, tensor: Tensor) -> Named:
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

    @property
    def _groups(self) -> int:
        names = ("mamba_n_groups", "n_groups")
        return next(self.config[name] for name in names if name in self.config)

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

    # --- metadata ---

    def metadata(self) -> dict[str, Any]:
        config = self.config
        own = {
            "lfm2": self._of_lfm2,
            "granitehybrid": self._of_granite,
            "nemotron_h": self._of_nemotron,
            "nemotron_h_moe": self._of_nemotron,
            "falcon-h1": self._of_falcon,
            "mamba2": self._of_mamba2,
            "deepseek2": self._of_deepseek,
        }
        eps = next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
        found = {
            "block_count": self.num_layers,
            "embedding_length": config["hidden_size"],
            "context_length": config.get("max_position_embeddings", 2**20),
            "attention.layer_norm_rms_epsilon": float(eps),
        }
        found |= own.get(self.architecture, self._of_qwen)()
        return {f"{self.architecture}.{key}": value for key, value in found.items()}

    def _of_heads(self, kv_layers: list[bool] | None = None) -> dict[str, Any]:
        config, kv = self.config, self.config["num_key_value_heads"]
        return {
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": kv if kv_layers is None else [kv if there else 0 for there in kv_layers],
        }

    def _of_angles(self) -> dict[str, Any]:
        return {"rope.freq_base": float(self.config["rope_parameters"]["rope_theta"])}

    def _of_lfm2(self) -> dict[str, Any]:
        config = self.config
        inner = config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:
            unit = config["block_multiple_of"]
            inner = -(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // unit) * unit
        return {
            **self._of_heads([kind == "full_attention" for kind in config["layer_types"]]),
            **self._of_angles(),
            "feed_forward_length": inner,
            "shortconv.l_cache": config["conv_L_cache"],
        }

    def _of_mamba(self, prefix: str, heads: int, inner: int, width: int, states: int) -> dict[str, Any]:
        return {
            "ssm.conv_kernel": width,
            "ssm.state_size": states,
            "ssm.group_count": self._groups,
            "ssm.inner_size": inner,
            "ssm.time_step_rank": heads,
        }

    def _of_hybrid_mamba(self, inner: int) -> dict[str, Any]:
        config = self.config
        return self._of_mamba("mamba_", config["mamba_n_heads"], inner, config["mamba_d_conv"], config["mamba_d_state"])

    def _of_granite(self) -> dict[str, Any]:
        config = self.config
        types = config.get("layer_types") or config["layers_block_type"]
        attends = [kind in ("full_attention", "attention") for kind in types]
        experts = config["num_local_experts"]
        of_experts = {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
        return {
            **self._of_heads(attends),
            **self._of_hybrid_mamba(config["mamba_expand"] * config["hidden_size"]),
            **(of_experts if experts else {}),
            "feed_forward_length": config["intermediate_size"],
            "rope.scaling.finetuned": False,
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }

    def _of_nemotron(self) -> dict[str, Any]:
        config = self.config
        types = config.get("layers_block_type") or config["layer_types"]
        heads = config["mamba_num_heads"]
        found = {
            **self._of_heads([kind in ("full_attention", "attention") for kind in types]),
            **self._of_mamba(
                "", heads, heads * config["mamba_head_dim"], config["conv_kernel"], config["ssm_state_size"]
            ),
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "feed_forward_length": [config["intermediate_size"] if kind == "mlp" else 0 for kind in types],
        }
        if self.architecture == "nemotron_h_moe":
            found |= {
                "expert_count": config["n_routed_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
                "expert_weights_scale": float(config["routed_scaling_factor"]),
                "expert_weights_norm": config["norm_topk_prob"],
                "expert_group_count": config["n_group"],
                "expert_group_used_count": config["topk_group"],
            }
        return found

    def _of_falcon(self) -> dict[str, Any]:
        config = self.config
        return {
            **self._of_heads(),
            **self._of_angles(),
            **self._of_hybrid_mamba(config["mamba_d_ssm"]),
            "feed_forward_length": config["intermediate_size"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
        }

    def _of_mamba2(self) -> dict[str, Any]:
        config = self.config
        inner = config["num_heads"] * config["head_dim"]
        return {
            **self._of_mamba("", config["num_heads"], inner, config["conv_kernel"], config["state_size"]),
            "feed_forward_length": 0,
            "attention.head_count": 0,
        }

    def _of_qwen(self) -> dict[str, Any]:
        config, rope = self.config, self.config["rope_parameters"]
        found = {
            **self._of_heads(),
            **self._of_angles(),
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "full_attention_interval": 4,
        }
        if self.architecture == "qwen35":
            return found | {"feed_forward_length": config["intermediate_size"]}
        return found | {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }

    def _of_deepseek(self) -> dict[str, Any]:
        config = self.config
        is_v2 = config["model_type"] == "deepseek_v2"
        dense = config.get("first_k_dense_replace")
        query = {"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
        groups = {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
        return {
            **query,
            **self._of_angles(),
            **({} if is_v2 else groups),
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": config["qk_rope_head_dim"],
            "feed_forward_length": config["intermediate_size"],
            "leading_dense_block_count": 1 if dense is None else dense,
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": not is_v2 and config["norm_topk_prob"],
            "expert_gating_func": 1 if is_v2 else 2,
        }
