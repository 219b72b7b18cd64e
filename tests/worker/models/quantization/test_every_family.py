"""Every stated family in every format: what a rank reads of a quantized folder is what it reads of its numbers.

One layout of each format, turned from family to family, runs in `make test`; all of them are slow.
"""

from typing import Any

from tests.worker.models.quantization.folders import SIZES

HYBRIDS = {
    "lfm2": "conv, attention, conv",
    "qwen3_5_text": "dense",
    "qwen3_5_moe_text": "mixture",
    "qwen3_next": "by key heads, mixture",
}
"""Families whose layers keep states, by their patterns, where the sizes below do not do."""

WIDER: dict[str, Any] = {**SIZES, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
"""Inputs of linears are whole groups, also on ranks."""
