"""Architectures of GGUF files: how each one's metadata is a Hugging Face config, and its tensors are those of that
model. Plain data and rules; anything that is not understood exactly is refused (`NotUnderstood`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.worker.models.formats.gguf_block_names import FLOATS
from holdfast.worker.models.formats.gguf_experts import (
    MIXTRAL,
    QWEN_EXPERTS,
    QWEN_ROUTER,
    QWEN_SHARED,
    each_expert,
    expert_shape,
    mixtral_experts,
    qwen_experts,
)
from holdfast.worker.models.formats.gguf_header import Header, StoredTensor
from holdfast.worker.models.formats.gguf_hybrids import HYBRIDS, hybrid_config, hybrid_tensors
from holdfast.worker.models.formats.gguf_metadata import Metadata, NamedTensor, NotUnderstood, of_pairs
from holdfast.worker.models.formats.gguf_rotary import rope_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Description of a `general.architecture`. The defaults are those of llama."""

    model_type: str
    hf_class: str
    layer: Mapping[str, str]
    """Modules of a layer by GGUF's names in a block."""
    settings: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    """Entries of the config, besides the common ones."""
    pairs_are_neighbours: bool = False
    """Rows of queries and keys lie as llama.cpp rotates them."""
    norms_are_more_by_one: bool = False
    has_experts: bool = False


_ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA: Final = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN_MOE: Final = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **QWEN_ROUTER, **QWEN_EXPERTS}
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_ROTARY: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Read for the config."""


def _biases(metadata: Metadata) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def _attention_bias(metadata: Metadata) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _granite(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata.count("embedding_length") // metadata.count("attention.head_count")
    return _biases(metadata) | {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Their queries are scaled by the hidden size of a head, which no metadata say, and all others' by the head's size."""


def _windowed_gemma(metadata: Metadata) -> dict[str, Any]:
    heads, head_dim = metadata.count("attention.head_count"), metadata.count("attention.key_length")
    is_27b = metadata.num_layers == _LAYERS_OF_27B[metadata.architecture]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": metadata.count("embedding_length") // heads if is_27b else head_dim,
        "sliding_window": metadata.count("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return _windowed_gemma(metadata) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


_ROTARY_OF_WINDOWS: Final = 10_000.0  # rope_theta of Gemma 3's sliding layers
_GEMMA3_PERIOD: Final = 6
"""One of this many layers attends to all tokens."""


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    layers = range(1, metadata.num_layers + 1)
    return _windowed_gemma(metadata) | {
        "layer_types": ["sliding_attention" if one % _GEMMA3_PERIOD else "full_attention" for one in layers],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": _ROTARY_OF_WINDOWS},
            "full_attention": rope_parameters(metadata),
        },
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    inner = metadata.count("expert_shared_feed_forward_length")
    return qwen_experts(metadata, normalized=False) | {"shared_expert_intermediate_size": inner}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return qwen_experts(metadata, normalized=True) | _attention_bias(metadata)


def _phi3(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata.count("embedding_length") // metadata.count("attention.head_count")
    rotated = metadata.count("rope.dimension_count", head_dim)
    original = metadata.get("rope.scaling.original_context_length")
    return {
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "partial_rotary_factor": rotated / head_dim,
        **({} if original is None else {"original_max_position_embeddings": original}),
    }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "gemma": Architecture(
        model_type="gemma",
        hf_class="GemmaForCausalLM",
        layer=_LLAMA,
        settings=_gemma,
        norms_are_more_by_one=True,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        hf_class="Gemma2ForCausalLM",
        layer={**_ATTENTION, **_NORMS_AROUND, **_MLP},
        settings=_gemma2,
        norms_are_more_by_one=True,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        hf_class="Gemma3ForCausalLM",
        layer={**_ATTENTION, **_HEAD_NORMS, **_NORMS_AROUND, **_MLP},
        settings=_gemma3,
        norms_are_more_by_one=True,
    ),
    "granite": Architecture(
        model_type="granite",
        hf_class="GraniteForCausalLM",
        layer=_LLAMA,
        settings=_granite,
        pairs_are_neighbours=True,
    ),
    "llama": Architecture(
        model_type="llama",
        hf_class="LlamaForCausalLM",
        layer=_LLAMA,
        settings=_biases,
        pairs_are_neighbours=True,
    ),
    "phi3": Architecture(
        model_type="phi3",
        hf_class="Phi3ForCausalLM",
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        settings=_phi3,
    ),
    "qwen2": Architecture(model_type="qwen2", hf_class="Qwen2ForCausalLM", layer=_LLAMA),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        hf_class="Qwen2MoeForCausalLM",
        layer={**_QWEN_MOE, **QWEN_SHARED},
        settings=_qwen2_moe,
        has_experts=True,
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        hf_class="Qwen3ForCausalLM",
        layer={**_LLAMA, **_HEAD_NORMS},
        settings=_attention_bias,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        hf_class="Qwen3MoeForCausalLM",
        layer={**_QWEN_MOE, **_HEAD_NORMS},
        settings=_qwen3_moe,
        has_experts=True,
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        hf_class="SmolLM3ForCausalLM",
        layer=_LLAMA,
        settings=_biases,
        pairs_are_neighbours=True,
    ),
}
"""Architectures by `general.architecture`. Mistral's models are written as llama's."""

_MIXTRAL: Final = Architecture(
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    layer={**_ATTENTION, "ffn_norm": "post_attention_layernorm", **MIXTRAL},
    settings=mixtral_experts,
    pairs_are_neighbours=True,
    has_experts=True,
)
"""Mixtral's models are written as llama's too, with experts."""


def architecture_of(header: Header) -> Architecture:
    """Raises `NotUnderstood` for an entry that is not listed above."""
    name = header.metadata.get("general.architecture")
    found = ARCHITECTURES.get(str(name))
    if found is None:
        known = ", ".join(sorted([*ARCHITECTURES, *HYBRIDS]))
        raise NotUnderstood(f"has architecture {name!r}; supported architectures of GGUF files are {known}")
    return _MIXTRAL if found.model_type == "llama" and header.metadata.get("llama.expert_count") else found


def hf_config(header: Header) -> dict[str, Any]:
    """Content of the model's config.json. Raises `NotUnderstood`."""
    metadata = Metadata(header)
    if metadata.architecture in HYBRIDS:
        return hybrid_config(metadata, _dtype(header))
    architecture = architecture_of(header)
    if metadata.get("expert_count") and not architecture.has_experts:
        raise NotUnderstood(f"has experts, which are not supported for architecture {metadata.architecture}")
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise NotUnderstood("has no table token_embd.weight")
    head_dim = metadata.get("attention.key_length") or _rotated_dims(metadata, architecture) or hidden // heads
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise NotUnderstood("has keys and values of different lengths")
    if metadata.get("rope.dimension_count", head_dim) != head_dim and architecture.model_type != "phi3":
        raise NotUnderstood(f"rotates {metadata.get('rope.dimension_count')} of {head_dim} dimensions of a head")
    config = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    settings = architecture.settings(metadata)
    config["rope_parameters"] = settings.pop("rope_parameters", None) or rope_parameters(metadata)
    return config | settings


def _rotated_dims(metadata: Metadata, architecture: Architecture) -> int | None:
    """The dimensions that llama.cpp rotates: the whole head unless a separate length is given."""
    rotated: int | None = metadata.get("rope.dimension_count")
    return rotated if architecture.pairs_are_neighbours else None


def _dtype(header: Header) -> str:
    """Dtype of the weights: bfloat16 if any are quantized, else the most frequent type by numbers."""
    matrices = [tensor for tensor in header.tensors.values() if len(tensor.shape) > 1]
    if any(tensor.kind not in FLOATS for tensor in matrices):
        return "bfloat16"
    counts = dict.fromkeys(FLOATS, 0)
    for tensor in matrices:
        counts[tensor.kind] += tensor.num_bytes
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[max(counts, key=lambda kind: counts[kind])]


def hf_tensors(header: Header, config: Mapping[str, Any]) -> list[NamedTensor]:
    """All tensors of the model, or their parts, by Hugging Face's names, in the order of the file.

    Raises `NotUnderstood` for one too many or too few, or of another shape than the config makes it.
    """
    if header.metadata.get("general.architecture") in HYBRIDS:
        return hybrid_tensors(header, config)
    architecture = architecture_of(header)
    names = dict(_TOP)
    for index in range(config["num_hidden_layers"]):
        names |= {f"blk.{index}.{own}": f"model.layers.{index}.{hf}" for own, hf in architecture.layer.items()}
    found: list[NamedTensor] = []
    for tensor in header.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        if tensor.name in _OF_ROTARY:
            continue
        if stem not in names or kind not in ("weight", "bias"):
            raise NotUnderstood(f"has a tensor {tensor.name}, which no model of its architecture has")
        for module, own in each_expert(names[stem], _checked(tensor, names[stem], kind, config)):
            found.append(_named(own, f"{module}.{kind}", architecture, config))
    missing = {f"{stem}.weight" for stem in names if stem != "output"} - header.tensors.keys()
    if missing:
        raise NotUnderstood(f"lacks {len(missing)} tensors, such as {min(missing)}")
    return found


def _named(tensor: StoredTensor, name: str, architecture: Architecture, config: Mapping[str, Any]) -> NamedTensor:
    heads = 0
    if architecture.pairs_are_neighbours and ".attn_q." in tensor.name:
        heads = config["num_attention_heads"]
    elif architecture.pairs_are_neighbours and ".attn_k." in tensor.name:
        heads = config["num_key_value_heads"]
    is_norm = tensor.name.endswith("norm.weight")
    offset = -1.0 if is_norm and architecture.norms_are_more_by_one else 0.0
    rows = of_pairs(tensor.shape[0], heads) if heads else None
    return NamedTensor(name=name, stored=tensor, rows=rows, plus=offset)


def _checked(tensor: StoredTensor, module: str, kind: str, config: Mapping[str, Any]) -> StoredTensor:
    """The tensor, with the shape that Hugging Face's has: a matrix of one row may be stored as a vector."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "qkv_proj": (queries + 2 * keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (size,),
        "k_norm": (size,),
    }
    shape = expert_shape(module, config) or shapes.get(module.rpartition(".")[2], (hidden,))
    expected = shape[:1] if kind == "bias" else shape
    if expected[:1] == (1,) and tensor.shape == expected[1:]:
        return replace(tensor, shape=expected)
    if tensor.shape != expected:
        raise NotUnderstood(f"has {tensor.name} of shape {tensor.shape}, where its metadata say {expected}")
    return tensor
