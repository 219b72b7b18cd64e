"""Text model of a checkpoint that holds several models, such as one for images and one for text: its config.json as
that of a causal language model, and the names of its tensors. Needs no torch.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.worker.models.safetensors_header import INDEX, read_header

_TEXT_TYPES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm46v": "glm4",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
}
"""Types of checkpoints whose text model is served, and the type of the text model where its config names none."""

_OTHER_NAMES: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
"""Types of checkpoints that another type's code computes, with the same entries and names of tensors."""

_SAME_ON_TEXT: Final[Mapping[str, str]] = {
    **_OTHER_NAMES,
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Text models that compute what another type computes where all three positions of a token are equal, as of text."""

_TRANSPOSED_EXPERTS: Final = frozenset({"qwen3_vl_moe"})
"""Types of checkpoints whose files have the weights of experts as [experts, in, out]."""

_PREFIXES: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    *((name, name) for name in ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")),
)
"""Prefixes of the text model's tensors in the files, and in the text model alone."""

_OF_IMAGES: Final = frozenset({"mrope_section", "mrope_interleaved"})
"""Entries of rotary angles that say which of three positions turns a pair."""

CLASSIFIERS: Final = "ForSequenceClassification"
"""End of the names of architectures that give scores."""

_MASKED: Final = ("ForMaskedLM", "ForPreTraining")

POOLING_ENTRIES: Final = frozenset(
    {
        *("architectures", "is_matryoshka", "matryoshka_dimensions", "classifier_from_token"),
        *("is_original_qwen3_reranker", "id2label", "problem_type"),
    }
)
"""Entries that say what becomes of pooled states, and nothing of the layers before (`pooling.py`)."""

_HEAD: Final = "lm_head.weight"
_OUTER: Final = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")
"""Entries that a config of several models may have once for all of them."""


def served_config(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`raw`, the config.json of `folder`; for a checkpoint with several models, the part of its text model."""
    if holds_text_model(raw):
        return text_config(raw, _names(folder))
    known = _OTHER_NAMES.get(str(raw.get("model_type")))
    raw = raw if known is None else {**raw, "model_type": known}
    return without_head(raw, folder) if is_without_head(raw) else raw


def is_without_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose states are pooled: one without a head for tokens, or with an encoder's,
    which guesses masked ones.
    """
    name = str((raw.get("architectures") or [""])[0])
    return name.endswith(("Model", CLASSIFIERS, *_MASKED)) and not name.endswith("LMHeadModel")


def without_head(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config of such a model as one of a causal language model: its table stands for the head it lacks."""
    kept = {key: value for key, value in raw.items() if key != "architectures"}
    return kept if _HEAD in _names(folder) else {**kept, "tie_word_embeddings": True}


def holds_text_model(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes several models, of which the text model is served."""
    return str(raw.get("model_type")) in _TEXT_TYPES


def text_config(raw: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Any]:
    """The config of the text model, by that of all models and the names of the stored tensors.

    The text model has a separate head if the files have one, as transformers decides; without names config.json
    decides.
    """
    outer = str(raw["model_type"])
    inner = raw.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else _flat(raw)
    found = str(text.get("model_type", _TEXT_TYPES[outer])) if isinstance(inner, Mapping) else _TEXT_TYPES[outer]
    text["model_type"] = _SAME_ON_TEXT.get(found, found)
    text.pop("architectures", None)
    if outer in _TRANSPOSED_EXPERTS:
        text["transposed_experts"] = True
    for key in _OUTER:
        if text.get(key) is None and raw.get(key) is not None:
            text[key] = raw[key]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            text[key] = _plain_rope(text[key])
    stored = {name for name in map(text_name, names) if name is not None}
    is_tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    text["tie_word_embeddings"] = _HEAD not in stored if stored else is_tied
    if isinstance(quantization := text.get("quantization_config"), Mapping):
        text["quantization_config"] = {key: _renamed(value) for key, value in quantization.items()}
    return text


def text_name(stored: str) -> str | None:
    """The name in the text model of a tensor or module in the files of a checkpoint with several models; None: it is of
    another model.
    """
    for prefix, begins in _PREFIXES:
        if stored.startswith(prefix):
            return begins + stored.removeprefix(prefix)
    return None


def name_in_model(folder: Path) -> Callable[[str], str | None]:
    """Name in `folder`'s model of a stored tensor; None for one of another model beside the text model."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = {}
    return text_name if isinstance(raw, dict) and holds_text_model(raw) else str


def text_model_notice(folder: Path) -> str | None:
    """A line for the log: which of the checkpoint's models is served. None where there is one alone."""
    if name_in_model(folder) is str:
        return None
    num_others = sum(text_name(name) is None for name in _names(folder))
    return f"the text model of the checkpoint is served; {num_others} tensors of other models stay on disk"


def key_mapping() -> dict[str, str]:
    """Like `text_name`, in regular expressions for transformers."""
    return {"^" + prefix.replace(".", r"\."): begins for prefix, begins in _PREFIXES if prefix != begins}


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Text config of a config that has the text model's entries beside those of the others."""
    kept = ("eos_token_id", "bos_token_id", "pad_token_id")
    return {
        key: value
        for key, value in raw.items()
        if not key.endswith("_config") and (not key.endswith("_token_id") or key in kept)
    }


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary angles of tokens that have one position."""
    plain = {key: value for key, value in rope.items() if key not in _OF_IMAGES}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain if plain.keys() - {"type", "rope_type"} or "default" not in plain.values() else None


def _renamed(value: Any) -> Any:
    """Lists of modules in a quantization's config have the names of the files."""
    if not isinstance(value, list):
        return value
    return [(text_name(f"{one}.") or f"{one}.")[:-1] if isinstance(one, str) else one for one in value]


def _names(folder: Path) -> set[str]:
    """Names of the stored tensors; none if they cannot be read, which is reported when they are loaded."""
    try:
        if (folder / INDEX).is_file():
            return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        return {name for path in folder.glob("*.safetensors") for name in read_header(path)[0]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return set()
