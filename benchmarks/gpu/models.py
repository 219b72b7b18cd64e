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
    "30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
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
"""Hugging Face's model type, and what its config says: Llama-3.1-8B; Qwen3-0.6B; Qwen3-30B-A3B with half of its layers,
whose weights are there twice while they are copied, and whose random routers choose all experts about alike; one for
tests.
"""

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
