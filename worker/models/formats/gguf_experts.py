"""Experts of GGUF files: all of a layer's experts are in one tensor [experts, out, in], which is split."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.formats.gguf_header import StoredTensor
from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""

QWEN_ROUTER: Final = {"ffn_gate_inp": "mlp.gate"}
QWEN_EXPERTS: Final = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
QWEN_SHARED: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GRANITE_MOE: Final = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
"""Modules of a layer by GGUF's names in a block; `{}` is the number of an expert."""


def shared_experts(module: str) -> dict[str, str]:
    """Modules of the experts that every token goes through, which are one MLP."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


def check_scores(metadata: Metadata, scores: int = SOFTMAX, *, may_scale: bool = False) -> None:
    """Raises `NotUnderstood` for experts that are chosen, or weighted, in another way."""
    found = metadata.get("expert_gating_func", scores)
    if found != scores:
        raise NotUnderstood(f"has expert_gating_func {found}; only {scores} is supported")
    if not may_scale and metadata.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise NotUnderstood("scales the weights of experts, which is not supported")


def inner_of_experts(metadata: Metadata) -> int:
    """Inner features of an expert: of mixtures without other MLPs they may be written as those."""
    key = "expert_feed_forward_length"
    return metadata.count(key if metadata.get(key) else "feed_forward_length")


def qwen_experts(metadata: Metadata, *, normalized: bool) -> dict[str, Any]:
    """Entries of the config. llama.cpp's code says whether weights are normalized; the metadata does not."""
    check_scores(metadata)
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def local_experts(metadata: Metadata, scores: int = SOFTMAX) -> dict[str, Any]:
    """Entries of the config of mixtures whose MLPs all have experts."""
    check_scores(metadata, scores)
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": inner_of_experts(metadata),
    }


def groups_of_experts(metadata: Metadata) -> dict[str, Any]:
    """Entries of the config: groups of experts, and how many of them are chosen."""
    return {
        "n_group": metadata.count("expert_group_count", 1),
        "topk_group": metadata.count("expert_group_used_count", 1),
    }


def each_expert(module: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of single experts, by their modules, of a tensor with all experts of a layer; others unchanged."""
    if "{}" not in module:
        yield module, tensor
        return
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    for number in range(count):
        offset = tensor.offset + number * size
        yield module.format(number), replace(tensor, shape=tuple(shape), offset=offset, num_bytes=size)
