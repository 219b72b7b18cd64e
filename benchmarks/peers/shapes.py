"""Shapes of the models that servers run. S has 18.9 million parameters, M is Qwen2.5-0.5B. Others have fewer layers:

L is LFM2-1.2B with 6 of 16, Q is Qwen3.5-0.8B with 8 of 24, F is Qwen3.5-4B with 4 of 32, G is Granite 4 H micro with 8
of 40, N is Qwen3-Next with 4 of 48 and 64 of 512 experts, E is Gemma 4 E2B with 10 of 35, of which five have keys and
values of their own. Q, G, N and E have a quarter of the vocabulary, F an eighth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An architecture of Hugging Face's and its sizes."""

    make_config: Callable[..., Any]
    make_model: Callable[..., Any]
    sizes: dict[str, Any]


_DELTA_NET: Final[dict[str, Any]] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""Sizes that models with Gated DeltaNet have in common."""

_ONE_IN_FOUR: Final = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

SHAPES: Final = {
    "S": Shape(
        make_config=LlamaConfig,
        make_model=LlamaForCausalLM,
        sizes={
            "vocab_size": 8192,
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1024,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "M": Shape(
        make_config=Qwen2Config,
        make_model=Qwen2ForCausalLM,
        sizes={
            "vocab_size": 151_936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "L": Shape(
        make_config=Lfm2Config,
        make_model=Lfm2ForCausalLM,
        sizes={
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12_288,
            "conv_L_cache": 3,
            "max_position_embeddings": 32_768,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "Q": Shape(
        make_config=Qwen3_5TextConfig,
        make_model=Qwen3_5ForCausalLM,
        sizes={
            **_DELTA_NET,
            "vocab_size": 62_080,
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "layer_types": _ONE_IN_FOUR * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 3584,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "F": Shape(
        make_config=Qwen3_5TextConfig,
        make_model=Qwen3_5ForCausalLM,
        sizes={
            **_DELTA_NET,
            "vocab_size": 31_040,
            "hidden_size": 2560,
            "num_hidden_layers": 4,
            "layer_types": _ONE_IN_FOUR,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 9216,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "G": Shape(
        make_config=GraniteMoeHybridConfig,
        make_model=GraniteMoeHybridForCausalLM,
        sizes={
            "vocab_size": 25_088,
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "position_embedding_type": None,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "N": Shape(
        make_config=Qwen3NextConfig,
        make_model=Qwen3NextForCausalLM,
        sizes={
            **_DELTA_NET,
            "vocab_size": 37_984,
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "layer_types": _ONE_IN_FOUR,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 5120,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "E": Shape(
        make_config=Gemma4TextConfig,
        make_model=Gemma4ForCausalLM,
        sizes={
            "vocab_size": 65_536,
            "vocab_size_per_layer_input": 65_536,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "num_hidden_layers": 10,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
            "num_kv_shared_layers": 5,
            "use_double_wide_mlp": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "intermediate_size": 6144,
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
}
