"""Model of a GGUF file: its metadata as a Hugging Face config, and its tensors by Hugging Face's names. Anything that
is not understood exactly is refused (`NotUnderstood`).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from holdfast.worker.models.formats.gguf_architecture import Architecture
from holdfast.worker.models.formats.gguf_block_names import FLOATS
from holdfast.worker.models.formats.gguf_changes import same
from holdfast.worker.models.formats.gguf_dense import DENSE
from holdfast.worker.models.formats.gguf_experts import each_expert, inner_of_experts
from holdfast.worker.models.formats.gguf_header import Header, StoredTensor
from holdfast.worker.models.formats.gguf_metadata import Metadata, NamedTensor, NotUnderstood
from holdfast.worker.models.formats.gguf_mixtures import MIXTURES
from holdfast.worker.models.formats.gguf_states import WITH_STATES

ARCHITECTURES: Final[Mapping[str, Architecture]] = {**DENSE, **MIXTURES, **WITH_STATES}
"""Architectures by `general.architecture`."""

_CLASSES: Final = {
    "arcee": "ArceeForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""Hugging Face's classes by model types."""

_TABLE: Final = "token_embd.weight"
_HEAD: Final = "output.weight"
_OF_ROTARY: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Read for the config."""


def hf_config(header: Header) -> dict[str, Any]:
    """Content of the model's config.json. Raises `NotUnderstood`."""
    metadata, architecture = Metadata(header), _architecture_of(header)
    if metadata.get("expert_count") and not architecture.has_experts:
        raise NotUnderstood(f"has experts, which are not supported for architecture {metadata.architecture}")
    table = header.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise NotUnderstood(f"has no table {_TABLE}")
    own = architecture.model_type
    model_type = own if isinstance(own, str) else own(metadata)
    common = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "dtype": _dtype(header),
        "vocab_size": table.shape[0],
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.num_own_layers,
        "tie_word_embeddings": _HEAD not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    config = common | architecture.settings(metadata)
    if metadata.get("expert_count") and not any("_exps." in name for name in header.tensors):
        raise NotUnderstood("has experts by its metadata, and no tensors of any, such as blk.0.ffn_up_exps.weight")
    return config


def _architecture_of(header: Header) -> Architecture:
    name = header.metadata.get("general.architecture")
    found = ARCHITECTURES.get(str(name))
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise NotUnderstood(f"has architecture {name!r}; supported architectures of GGUF files are {known}")
    return found


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
    """All tensors of the model, or their parts, by Hugging Face's names.

    Raises `NotUnderstood` for one too many or too few, or of another shape than the metadata make it.
    """
    metadata, architecture, num_layers = Metadata(header), _architecture_of(header), config["num_hidden_layers"]
    names = _names(header, architecture, num_layers)
    parts = _parts(names)
    found: list[NamedTensor] = []
    for tensor in header.tensors.values():
        if tensor.name in _OF_ROTARY or num_layers <= _layer(tensor.name) < metadata.num_layers:
            continue  # it is read for the config, or drafts
        whole = names.get(tensor.name) or _name_of_bias(tensor.name, names)
        if whole is None:
            raise NotUnderstood(f"has a tensor {tensor.name}, which no model of its architecture has")
        own = tensor.name.split(".", 2)[-1] if tensor.name.startswith("blk.") else tensor.name
        if architecture.has_usual_shapes:
            _check_shape(tensor, own, whole, metadata, config)
        change = architecture.changes.get(own, same)
        plus = architecture.plus if own.endswith("norm.weight") and not own.startswith("ssm_") else 0.0
        for each, one in each_expert(whole, tensor):
            named = NamedTensor(name=each, stored=one, part=parts.get(tensor.name, 0), plus=plus)
            found += change(named, config)
    optional = architecture.optional | {_HEAD}
    needed = {stored for stored in names if not {stored, stored.split(".", 2)[-1]} & optional}
    if missing := needed - header.tensors.keys():
        raise NotUnderstood(f"lacks {len(missing)} tensors, such as {min(missing)}")
    return sorted(found, key=lambda one: (one.name, one.part))


def _names(header: Header, architecture: Architecture, num_layers: int) -> dict[str, str]:
    """Parameters by the names of required tensors."""
    names = dict(architecture.top)
    for index in range(num_layers):
        parts = [
            part for part in architecture.parts if any(f"blk.{index}.{own}" in header.tensors for own in part)
        ] or architecture.parts[:1]
        for part in parts:
            names |= {f"blk.{index}.{own}": f"{architecture.base}{index}.{name}" for own, name in part.items()}
    return names


def _parts(names: Mapping[str, str]) -> dict[str, int]:
    """Number of each stored tensor among those of its parameter."""
    counts: Counter[str] = Counter()
    found: dict[str, int] = {}
    for stored, name in names.items():
        found[stored] = counts[name]
        counts[name] += 1
    return found


def _layer(name: str) -> int:
    """-1 for a tensor of no layer."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return int(block) if block.isdigit() else -1


def _name_of_bias(stored: str, names: Mapping[str, str]) -> str | None:
    weight = names.get(f"{stored.removesuffix('.bias')}.weight") if stored.endswith(".bias") else None
    return None if weight is None else f"{weight.removesuffix('.weight')}.bias"


def _check_shape(tensor: StoredTensor, own: str, name: str, metadata: Metadata, config: Mapping[str, Any]) -> None:
    """Raises `NotUnderstood` for a shape that does not follow from the sizes in the metadata."""
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    inner = metadata.count("feed_forward_length")
    shapes = {
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "output_norm": (hidden,),
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if "gate_up_proj" in name else inner, hidden),
        "ffn_down": (hidden, inner),
        **_shapes_of_experts(metadata, hidden),
    }
    module, _, kind = own.rpartition(".")
    expected = shapes.get(module)
    if expected is None:
        return
    if kind == "bias":
        expected = expected[:-1] if len(expected) > 1 else expected
    if tensor.shape != expected:
        raise NotUnderstood(f"has {tensor.name} of shape {tensor.shape}, where its metadata say {expected}")


def _shapes_of_experts(metadata: Metadata, hidden: int) -> dict[str, tuple[int, ...]]:
    if not metadata.get("expert_count"):
        return {}
    count, inner = metadata.count("expert_count"), inner_of_experts(metadata)
    return {
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, inner, hidden),
        "ffn_up_exps": (count, inner, hidden),
        "ffn_down_exps": (count, hidden, inner),
    }
