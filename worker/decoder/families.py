"""Families of models: how the Hugging Face modules of each are to be read as a decoder layout.

What may live here: data, one entry for each model type. What may not: reading (`recognize.py`). What an entry claims is
proved at every load (`proof.py`), so a family whose code changes is served by the skeleton, not wrongly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Scale = Callable[[Any], float]
"""A constant of a model, by its Hugging Face config."""


def _one(config: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of modules inside a layer, and what else its kind does. The defaults are those of llama."""

    final_norm: str = "norm"
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    """Added to the weights of norms (Gemma)."""
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name: fused, all queries, then all keys, then all values."""
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    """Both where the module is there; over each head, or over all heads together if its weight is as long."""
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name: fused, gate first. Where `has_gate` is not set, the name of the first linear."""
    has_gate: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    interleaved: bool = False
    """Rotary pairs are neighbours."""
    embedding_scale: Scale = _one
    logit_scale: Scale = _one
    residual_scale: Scale = _one
    logit_softcap: Callable[[Any], float | None] = field(default=lambda config: None)


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}
"""By `model_type` of the Hugging Face config."""
