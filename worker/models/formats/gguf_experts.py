"""Experts of GGUF files: all of a layer's experts are in one tensor [experts, out, in], which is split."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from holdfast.worker.models.formats.gguf_header import StoredTensor
from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood

_SOFTMAX: Final = 1
"""Value of `expert_gating_func`."""

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
"""Modules of a layer by GGUF's names in a block; `{}` is the number of an expert."""


def qwen_experts(metadata: Metadata, *, normalized: bool) -> dict[str, Any]:
    """Entries of the config. llama.cpp's code says whether weights are normalized; the metadata does not."""
    return {
        "num_experts": _count(metadata),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def mixtral_experts(metadata: Metadata) -> dict[str, Any]:
    """Entries of the config."""
    return {
        "num_local_experts": _count(metadata),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }


def _count(metadata: Metadata) -> int:
    """Raises `NotUnderstood` for experts that are chosen in another way."""
    if metadata.get("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise NotUnderstood(f"has expert_gating_func {metadata.get('expert_gating_func')}; only 1 is supported")
    if metadata.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise NotUnderstood("scales the weights of experts, which is not supported")
    return metadata.count("expert_count")


def expert_shape(module: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Shape of a tensor of a mixture; None for other modules."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if count is None:
        return None
    hidden, name = config["hidden_size"], module.rpartition(".")[2]
    if name == "gate":
        return count, hidden
    if name == "shared_expert_gate":
        return 1, hidden
    is_shared = ".shared_expert." in module
    if not is_shared and ".experts." not in module:
        return None
    own = config.get("shared_expert_intermediate_size") if is_shared else config.get("moe_intermediate_size")
    inner = own or config["intermediate_size"]
    shape = (hidden, inner) if name in ("down_proj", "w2") else (inner, hidden)
    return shape if is_shared else (count, *shape)


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
