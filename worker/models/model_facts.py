"""Facts of a model besides its computation: model type, vocabulary size, maximum length, end tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.worker.models.checks import choose_max_model_len
from holdfast.worker.models.pooling import max_tokens_of
from holdfast.worker.models.weights import read_eos_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model besides how it computes."""

    model_type: str
    vocab_size: int
    max_model_len: int
    """Longest sequence that it is served with."""
    eos_token_ids: tuple[int, ...]
    """Ascending."""


def facts_of(config: Any, folder: Path, max_model_len: int | None) -> ModelFacts:
    """Facts by the Hugging Face config of a model, or its stated config, and the requested `model.max_model_len`.

    Raises `ConfigurationError` and `UnsupportedModelError` for a length that the model does not have.
    """
    longest = choose_max_model_len(config, max_model_len)
    if max_model_len is None:
        longest = min(longest, max_tokens_of(folder) or longest)
    return ModelFacts(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        max_model_len=longest,
        eos_token_ids=tuple(sorted(i for i in read_eos_token_ids(folder, config) if 0 <= i < config.vocab_size)),
    )
