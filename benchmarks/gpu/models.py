"""Models of the GPU measurements: configs without weights, which are drawn at random where a model is loaded."""

from pathlib import Path
from typing import Any, Final

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
        },
    ),
    "0.6b": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
    ),
}
"""Llama-3.1-8B, Qwen3-0.6B, and one for tests: Hugging Face's model type, and what its config says."""

MAX_POSITIONS: Final = 4096


def config_of(name: str) -> Any:
    """The Hugging Face config of a model."""
    from transformers import AutoConfig

    model_type, values = MODELS[name]
    return AutoConfig.for_model(
        model_type, **values, max_position_embeddings=MAX_POSITIONS, dtype="bfloat16", pad_token_id=None
    )


def save_config(name: str, folder: Path) -> Path:
    """Writes the config of a model to `folder` and returns it."""
    config_of(name).save_pretrained(folder)
    return folder
