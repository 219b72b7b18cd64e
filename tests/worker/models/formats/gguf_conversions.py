"""What llama.cpp's converter does with the tensors of models with attention in all layers, and the other way round."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ONE_OF_MANY = re.compile(r"(.*\.(?:experts|norms))\.(\d+)(\..*)")


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the tensors of experts, or of norms of heads, that lie one by one as one [experts, out, in]."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (one := _ONE_OF_MANY.fullmatch(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(one[1] + one[3], {})[int(one[2])] = tensor
    return found | {name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}


def single(name: str, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """The other way round."""
    many = re.search(r"\.(experts|norms)\.(?!gate_up_proj|down_proj(?!\.))", name)
    if many is None:
        return {name: numbers}
    return {name.replace(many[0], f"{many[0]}{number}."): one for number, one in enumerate(numbers)}


@dataclass
class Rule:
    """What the converter does with a tensor by Hugging Face's name: it becomes others, and these are it again."""

    owns: tuple[str, ...] = ()
    """GGUF's names; none: that of the package's mapping."""
    split: Callable[[torch.Tensor], list[torch.Tensor]] = lambda tensor: [tensor]
    join: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]


def rule_of(architecture: str, config: Mapping[str, Any], name: str) -> Rule:
    block = f"blk.{found[1]}." if (found := re.search(r"layers\.(\d+)\.", name)) else ""
    if "block_sparse_moe.input_linear" in name:
        owns = (f"{block}ffn_gate_exps.weight", f"{block}ffn_up_exps.weight")
        return Rule(owns, lambda tensor: list(tensor.chunk(2, -2)), lambda parts: torch.cat(parts, -2))
    if architecture == "gpt-oss" and "experts.gate_up_proj" in name:
        kind = "bias" if name.endswith("bias") else "weight"
        owns = (f"{block}ffn_gate_exps.{kind}", f"{block}ffn_up_exps.{kind}")
        if kind == "bias":
            return Rule(owns, lambda tensor: [tensor[:, ::2], tensor[:, 1::2]], in_turns)
        return Rule(
            owns, lambda tensor: [tensor.mT[:, ::2], tensor.mT[:, 1::2]], lambda parts: in_turns(parts).mT.contiguous()
        )
    if architecture == "gpt-oss" and "experts.down_proj" in name:
        if name.endswith("bias"):
            return Rule((f"{block}ffn_down_exps.bias",))
        return Rule(
            (f"{block}ffn_down_exps.weight",), lambda tensor: [tensor.mT], lambda parts: parts[0].mT.contiguous()
        )
    if name.endswith("self_attn.sinks"):
        return Rule((f"{block}attn_sinks.weight",))
    if "attention.query_key_value" in name:
        heads = config["num_attention_heads"]
        return Rule(
            split=lambda tensor: [tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)],
            join=lambda parts: parts[0].unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),
        )
    return Rule()


def in_turns(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows, or numbers, of two tensors by turns."""
    return torch.stack(parts, 2).flatten(1, 2)


def names_of(names: Any, hf_name: str) -> str:
    name = hf_name.replace("e_score_correction_bias", "e_score_correction.bias")
    own = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if own is None:  # the package knows norms of heads by the module above them
        own = names.get_name(name.replace("layernorm.norms.", "layernorm."), try_suffixes=(".weight", ".bias"))
    assert own is not None, hf_name
    return str(own)


_QKV = ("q_proj", "k_proj", "v_proj")


def together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With queries, keys and values as one tensor, under the name that the package has for Phi-2's."""
    found = {name: tensor for name, tensor in tensors.items() if not any(f".{part}." in name for part in _QKV)}
    for name in tensors:
        if ".q_proj." in name:
            rows = torch.cat([tensors[name.replace("q_proj", part)] for part in _QKV])
            found[name.replace("self_attn.q_proj", "self_attn.query_key_value")] = rows
    return found


def apart(numbers: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The other way round."""
    found = {}
    for name, tensor in numbers.items():
        if "self_attn.query_key_value" not in name:
            found[name] = tensor
            continue
        queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
        size = len(tensor) // (queries + 2 * keys)
        for part, rows in zip(_QKV, tensor.split([queries * size, keys * size, keys * size]), strict=True):
            found[name.replace("query_key_value", part)] = rows.contiguous()
    return found
