"""Encoders that are served, by the entries of config.json, and the refusal of others."""

from collections.abc import Mapping
from typing import Any, Final

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.encoder import Encoder
from holdfast.worker.models.encoder_families import ENCODERS
from holdfast.worker.models.text_model import is_without_head

WAY_OUT: Final = "Use sentence-transformers for it"

_OTHERS: Final = frozenset(
    {
        *("albert", "deberta", "deberta-v2", "distilbert", "electra", "eurobert", "gte", "longformer", "mpnet"),
        *("new", "nomic_bert", "t5", "xlm-roberta-xl"),
    }
)


def encoder_of(model_type: str) -> Encoder | None:
    """The encoder's part of a family; None: it is no encoder."""
    family = ENCODERS.get(model_type)
    return None if family is None else family.encoder


def why_not_pooled(model_type: str) -> str:
    """Why states of a type are not pooled that is of no family."""
    if model_type in _OTHERS:
        return f"it is an encoder; those of the types {', '.join(ENCODERS)} are served"
    return "its type is not among the families of the native backend, which alone pools states"


def check_encoder(raw: Mapping[str, Any], model_type: str, runner: str) -> None:
    """Refuses an encoder that is to generate text or to label tokens."""
    architecture = str((raw.get("architectures") or ["Model"])[0])
    if runner == "generate":
        reason = "it is an encoder, which generates no text"
        raise UnsupportedModelError(model_type, reason, "Leave model.runner at auto")
    if not (is_without_head(raw) or architecture == "Model"):
        reason = f"of its architecture {architecture} there are neither vectors nor scores of texts"
        raise UnsupportedModelError(model_type, reason, "Serve one that ends with Model or ForSequenceClassification")


def check_has_native_backend(model_type: str, reason: str) -> None:
    """Refuses an encoder that must run on the HF backend, for a reason: that has causal language models alone."""
    if encoder_of(model_type) is not None:
        reason = f"it is an encoder, which the native backend on CPUs alone computes, and there is none: {reason}"
        raise UnsupportedModelError(model_type, reason, WAY_OUT)


def check_settings(config: WorkerConfig) -> None:
    """Refuses settings that an encoder does not have: adapters, and stores of keys and values, of which none is used
    twice.
    """
    kept = {"kv_offload_disk": config.cache.kv_offload_disk, "kv_offload_memory": config.cache.kv_offload_memory}
    for name, value in kept.items():
        if value is not None:
            raise ConfigurationError(f"cache.{name}: must be unset: an encoder computes each prompt as a whole")
    if config.model.serves_adapters:
        raise ConfigurationError("model.enable_lora, model.lora: must be unset: encoders are served without adapters")
