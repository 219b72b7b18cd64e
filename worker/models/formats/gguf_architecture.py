"""Description of an architecture of GGUF files (`general.architecture`): how its metadata is a Hugging Face config, and
which parameter each stored tensor is. Plain data, of which the tables of architectures are made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.worker.models.formats.gguf_changes import Change, paired
from holdfast.worker.models.formats.gguf_metadata import Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture. Names of stored tensors in `parts`, `optional` and `changes` are GGUF's in a block."""

    model_type: str | Callable[[Metadata], str]
    settings: Callable[[Metadata], dict[str, Any]]
    """Content of the config, besides what all models have."""
    top: Mapping[str, str]
    """Parameters by stored tensors that are in no layer; the head is optional."""
    parts: tuple[Mapping[str, str], ...]
    """Parts of a layer: its parameters by stored tensors; two for one parameter are its rows, in this order. A layer
    has the parts of which the file has a tensor, and biases where the file has them."""
    optional: frozenset[str] = frozenset()
    """Stored tensors that a part, or the top, may lack."""
    base: str = "model.layers."
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Rules by stored tensors, for tensors that are not the parameter itself."""
    plus: float = 0.0
    """Value added to the weights of all norms but those of states."""
    has_usual_shapes: bool = True
    """Heads, experts and MLPs of all layers have the shapes that the metadata of most architectures say."""

    @property
    def has_experts(self) -> bool:
        return any(own.endswith("_exps.weight") for part in self.parts for own in part)


def weights(modules: Mapping[str, str]) -> dict[str, str]:
    """Parameters by stored tensors, of modules by their names in a block."""
    return {f"{own}.weight": f"{name}.weight" for own, name in modules.items()}


def gated(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """Modules of an MLP."""
    return {"ffn_gate": f"{module}.{gate}", "ffn_up": f"{module}.{up}", "ffn_down": f"{module}.{down}"}


QKV: Final = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
ATTENTION: Final = {**QKV, "attn_output": "self_attn.o_proj"}
HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
MLP: Final = gated("mlp")
TOP: Final = weights({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})

PAIRED: Final[Mapping[str, Change]] = {
    f"{name}.{kind}": paired(heads)
    for name, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}
"""Rows of queries and keys lie as llama.cpp rotates them."""
