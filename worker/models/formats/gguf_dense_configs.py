"""Configs of dense architectures, from a GGUF file's metadata (`gguf_dense.py`). All raise `NotUnderstood`."""

from typing import Any, Final

from holdfast.worker.models.formats.gguf_experts import local_experts
from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood
from holdfast.worker.models.formats.gguf_rotary import rope_parameters
from holdfast.worker.models.formats.gguf_settings import (
    any_layer_has,
    attention_bias,
    biases,
    granite_scales,
    layer_norm,
    rms,
    sizes,
    usual,
    usual_paired,
    windows,
)

_SQUARED_RELU: Final = {"hidden_act": "relu2"}
_PERIOD: Final = 4
"""One of this many layers attends to all tokens, in Cohere 2, EXAONE 4 and OLMo 3."""


def llama(metadata: Metadata) -> dict[str, Any]:
    """Entries of `LlamaConfig` or `MixtralConfig`."""
    if metadata.get("expert_count"):
        return usual_paired(metadata) | local_experts(metadata) | {"sliding_window": None}
    return usual_paired(metadata) | biases(metadata)


def granite(metadata: Metadata) -> dict[str, Any]:
    """Entries of `GraniteConfig`."""
    found = usual_paired(metadata)
    return found | biases(metadata) | granite_scales(metadata, found["head_dim"])


def gemma(metadata: Metadata) -> dict[str, Any]:
    """Entries of `GemmaConfig`."""
    return usual(metadata) | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Their queries are scaled by the hidden size of a head, which no metadata say, and all others' by the head's size."""


def _windowed_gemma(metadata: Metadata) -> dict[str, Any]:
    heads, head_dim = metadata.count("attention.head_count"), metadata.count("attention.key_length")
    is_27b = metadata.num_layers == _LAYERS_OF_27B[metadata.architecture]
    return usual(metadata) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": metadata.count("embedding_length") // heads if is_27b else head_dim,
        "sliding_window": metadata.count("attention.sliding_window"),
    }


def gemma2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Gemma2Config`."""
    return _windowed_gemma(metadata) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


_ROTARY_OF_WINDOWS: Final = 10_000.0  # rope_theta of Gemma 3's sliding layers
_GEMMA3_PERIOD: Final = 6
"""One of this many layers attends to all tokens."""


def gemma3(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Gemma3TextConfig`."""
    return (
        _windowed_gemma(metadata)
        | windows(metadata, _GEMMA3_PERIOD)
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": _ROTARY_OF_WINDOWS},
                "full_attention": rope_parameters(metadata),
            },
        }
    )


def phi3(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Phi3Config`."""
    original = metadata.get("rope.scaling.original_context_length")
    return (
        sizes(metadata, is_partial=True)
        | rms(metadata)
        | {"sliding_window": metadata.get("attention.sliding_window") or None}
        | ({} if original is None else {"original_max_position_embeddings": original})
    )


def phi2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `PhiConfig`."""
    return sizes(metadata, is_partial=True) | layer_norm(metadata) | {"hidden_act": "gelu_new", "qk_layernorm": False}


def gpt_neox(metadata: Metadata) -> dict[str, Any]:
    """Entries of `GPTNeoXConfig`."""
    return (
        sizes(metadata, is_partial=True)
        | layer_norm(metadata)
        | {
            "hidden_act": "gelu",
            "attention_bias": any_layer_has(metadata, "attn_qkv.bias"),
            "use_parallel_residual": bool(metadata.get("use_parallel_residual", True)),
        }
    )


def cohere(metadata: Metadata) -> dict[str, Any]:
    """Entries that both Cohere configs have."""
    scale = {"logit_scale": metadata.number("logit_scale")}
    return sizes(metadata) | layer_norm(metadata) | attention_bias(metadata) | scale


def command_r(metadata: Metadata) -> dict[str, Any]:
    """Entries of `CohereConfig`."""
    return cohere(metadata) | {"use_qk_norm": any_layer_has(metadata, "attn_q_norm.weight")}


def ernie(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Ernie4_5Config`."""
    return usual(metadata) | {"use_bias": any_layer_has(metadata, "attn_q.bias")}


def glm4(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Glm4Config`."""
    if metadata.get("rope.dimension_sections"):
        raise NotUnderstood("has queries and keys in the order of GLM-4V's positions, which is not supported")
    return sizes(metadata, is_partial=True) | rms(metadata) | attention_bias(metadata)


def nemotron(metadata: Metadata) -> dict[str, Any]:
    """Entries of `NemotronConfig`."""
    eps = layer_norm(metadata, "norm_eps")
    return sizes(metadata, is_partial=True) | eps | biases(metadata) | _SQUARED_RELU


def olmo(metadata: Metadata) -> dict[str, Any]:
    """Entries of `OlmoConfig`."""
    limit = metadata.get("attention.clamp_kqv")
    return sizes(metadata) | attention_bias(metadata) | {"clip_qkv": limit}


def olmo2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Olmo2Config` or `Olmo3Config`."""
    found = usual(metadata) | attention_bias(metadata)
    if not metadata.get("attention.sliding_window"):
        return found
    whole = found["rope_parameters"]
    of_windows = {"rope_type": "default", "rope_theta": whole["rope_theta"]}
    angles = {"sliding_attention": of_windows, "full_attention": whole}
    return found | windows(metadata, _PERIOD) | {"rope_parameters": angles}


def seed(metadata: Metadata) -> dict[str, Any]:
    """Entries of `SeedOssConfig`."""
    outputs = {"attention_out_bias": any_layer_has(metadata, "attn_output.bias")}
    return usual(metadata) | biases(metadata) | outputs


def stablelm(metadata: Metadata) -> dict[str, Any]:
    """Entries of `StableLmConfig`."""
    return (
        sizes(metadata, is_partial=True)
        | layer_norm(metadata)
        | {
            "use_qkv_bias": any_layer_has(metadata, "attn_q.bias"),
            "use_parallel_residual": not any_layer_has(metadata, "ffn_norm.weight"),
            "qk_layernorm": any_layer_has(metadata, "attn_q_norm.weight"),
        }
    )


_STARCODER2_WINDOW: Final = 4096
"""Tokens of a window in all StarCoder2 models; the metadata do not say it."""


def starcoder2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Starcoder2Config`."""
    return (
        sizes(metadata)
        | layer_norm(metadata, "norm_epsilon")
        | {
            "use_bias": any_layer_has(metadata, "attn_q.bias"),
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": metadata.count("attention.sliding_window", _STARCODER2_WINDOW),
        }
    )


def mistral3(metadata: Metadata) -> dict[str, Any]:
    """Entries of `MistralConfig` (Mistral Small 3), or of `Ministral3Config`: its queries grow with their positions."""
    found = usual_paired(metadata) | {"sliding_window": None}
    if metadata.get("attention.temperature_scale") is None:
        return found
    weight = metadata.number("rope.scaling.yarn_log_multiplier", 1.0)
    own = {
        "llama_4_scaling_beta": metadata.number("attention.temperature_scale"),
        "mscale": weight,
        "mscale_all_dim": weight,
    }
    return found | {"rope_parameters": {**found["rope_parameters"], **own}}


def qwen3(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Qwen3Config`."""
    return usual(metadata) | attention_bias(metadata)


def smollm3(metadata: Metadata) -> dict[str, Any]:
    """Entries of `SmolLM3Config`."""
    return usual_paired(metadata) | biases(metadata)


def arcee(metadata: Metadata) -> dict[str, Any]:
    """Entries of `ArceeConfig`."""
    return smollm3(metadata) | _SQUARED_RELU


def exaone4(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Exaone4Config`."""
    return usual(metadata) | windows(metadata, _PERIOD)


def cohere2(metadata: Metadata) -> dict[str, Any]:
    """Entries of `Cohere2Config`."""
    return cohere(metadata) | windows(metadata, _PERIOD)
