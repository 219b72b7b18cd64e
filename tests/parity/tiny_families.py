"""Tiny models of every family that the installed transformers has a causal language model for."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from tests.parity.families import BASE, LATENT, MOE, REFUSED, ROUTED, SERVED, randomize
from tests.parity.hybrids import PATTERNS

MAX_PARAMETERS: Final = 2_000_000

_EXPERTS: Final = {
    **MOE,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 16,
}
_STATES: Final = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 16}
_PER_LAYER: Final = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 126,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
_OLD_NAMES: Final = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 48,
    "rotary_dim": 4,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "d_ff": 48,
    "ffn_dim": 48,
    "attention_heads": 4,
    "num_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "embedding_size": 32,
    "attention_types": [[["global", "local"], 1]],
}

_OWN_SHAPES: Final[dict[str, dict[str, Any]]] = {
    **SERVED,
    **REFUSED,
    **dict(reversed(PATTERNS.values())),
    "gemma3n_text": {
        **_PER_LAYER,
        "laurel_rank": 4,
        "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {**_PER_LAYER, "global_head_dim": 8},
}

_SHAPES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"num_key_value_heads": 4},
    _EXPERTS,
    {**_EXPERTS, **LATENT, **ROUTED},
    {**LATENT, **ROUTED, **_EXPERTS, "num_hidden_layers": 4, **_STATES},
    {"head_dim": ..., "num_key_value_heads": ...},
    {**_OLD_NAMES, "head_dim": ..., "num_key_value_heads": ...},
    {**_EXPERTS, **_STATES, "num_hidden_layers": 4},
)
"""Tried in turn, until a family takes one: added to `BASE`; `...` takes a value away."""


def causal_families() -> list[str]:
    """Model types, as AutoModelForCausalLM knows them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(model_type: str) -> Any:
    """The config of a family as large as it comes, as a checkpoint of its causal language model has it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(model_type)
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config.architectures = [named if isinstance(named, str) else named[0]]
    return config


def tiny_model(model_type: str) -> Any | None:
    """A small random model in float32 that Hugging Face itself can run; None where no shape above makes one."""
    for values in _shapes(model_type):
        try:
            model = _built(model_type, values)
            if model is not None and _runs(model):
                return model
        except Exception:  # transformers refuses a shape by any class of error
            continue
    return None


def _shapes(model_type: str) -> Iterator[dict[str, Any]]:
    own = [_OWN_SHAPES[model_type]] if model_type in _OWN_SHAPES else []
    for more in (*own, *_SHAPES):
        yield {key: value for key, value in {**BASE, **more}.items() if value is not ...}


def _built(model_type: str, values: dict[str, Any]) -> Any | None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        if AutoModelForCausalLM.from_config(config).num_parameters() > MAX_PARAMETERS:
            return None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def _runs(model: Any) -> bool:
    with torch.inference_mode():
        return bool(model(input_ids=torch.arange(3, 15)[None]).logits.isfinite().all())
