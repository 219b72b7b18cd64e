"""Bases of families: what several entries of the tables have in common."""

from dataclasses import replace
from typing import Final

from holdfast.worker.models.family import Family, HeadNorms, Moe, NextToken, NormKind, Windows
from holdfast.worker.models.family_rules import derive_lfm2, derive_qwen, full_every, is_sparse, short_conv_length

BIASES: Final = {"attention_bias": False, "mlp_bias": False}
TYPES: Final = {"sliding_window": 4096, "layer_types": None}
QWEN_TYPES: Final = {**TYPES, "use_sliding_window": False, "max_window_layers": 28, "eos_token_id": None}
EXPERTS: Final = {"num_experts_per_tok": 2, "num_local_experts": 8}
LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    entries=BIASES,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
PLAIN: Final = replace(LLAMA, entries={"attention_bias": False}, mlp_bias=False)
"""Attention may have biases; the MLP does not."""
BARE: Final = replace(PLAIN, entries={}, qkv_bias=False, output_bias=False)
GEMMA: Final = replace(
    PLAIN,
    architecture="GemmaForCausalLM",
    entries={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "attention_bias": False,
    },
    # "gelu" in the first configs means the approximation, as transformers reads them
    derive=lambda config: setattr(config, "hidden_act", config.hidden_act.replace("gelu", "gelu_pytorch_tanh")[:17]),
    norm=NormKind.RMS_PLUS_ONE,
    scales_embedding=True,
)
GEMMA2: Final = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    entries={
        **GEMMA.entries,
        **TYPES,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    derive=full_every(2),
    activation="hidden_activation",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    scaling=lambda config: float(config.query_pre_attn_scalar**-0.5),
    windows=Windows.BY_TYPE,
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
COHERE: Final = replace(
    PLAIN,
    architecture="CohereForCausalLM",
    entries={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    },
    norm=NormKind.LAYER,
    eps="layer_norm_eps",
    mlp_norm=None,
    parallel=True,
    shared_norm=True,
    head_norms=HeadNorms.OWN,
    has_head_norms="use_qk_norm",
    theta=500_000.0,
    interleaved=True,
    logit_scale=lambda config: float(config.logit_scale),
)
ERNIE: Final = replace(
    LLAMA,
    architecture="Ernie4_5ForCausalLM",
    entries={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    qkv_bias="use_bias",
    output_bias="use_bias",
    mlp_bias="use_bias",
    theta=500_000.0,
    interleaved=True,
)
GRANITE: Final = replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    entries={
        **BIASES,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    scaling=lambda config: float(config.attention_multiplier),
    embedding_scale=lambda config: float(config.embedding_multiplier),
    residual_scale=lambda config: float(config.residual_multiplier),
    logit_scale=lambda config: 1.0 / config.logits_scaling,
)
GLM: Final = replace(
    BARE,
    architecture="GlmForCausalLM",
    entries={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "eos_token_id": [151329, 151336, 151338],
        "attention_bias": True,
    },
    qkv_bias="attention_bias",
    partial=0.5,
    interleaved=True,
    gate_up=("gate_up_proj",),
)
OLMO: Final = replace(
    PLAIN,
    architecture="OlmoForCausalLM",
    entries={"eos_token_id": 50279, "attention_bias": False},
    norm=NormKind.LAYER_WITHOUT_WEIGHTS,
)
OLMO2: Final = replace(
    OLMO,
    architecture="Olmo2ForCausalLM",
    entries={**OLMO.entries, "rms_norm_eps": 1e-5},
    norm=NormKind.RMS,
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
    head_norms=HeadNorms.ONE_FOR_ALL,
)
HUNYUAN: Final = replace(
    PLAIN,
    architecture="HunYuanDenseV1ForCausalLM",
    entries={"rms_norm_eps": 1e-5, "attention_bias": False},
    head_norms=HeadNorms.ONE_FOR_EACH,
    query_norm="query_layernorm",
    key_norm="key_layernorm",
    norms_after_rotation=True,
    rope_kinds={"dynamic": "ntk_alpha"},
)
MISTRAL: Final = replace(
    BARE,
    architecture="MistralForCausalLM",
    entries={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=Windows.ALL,
)
QWEN2: Final = replace(
    BARE,
    architecture="Qwen2ForCausalLM",
    entries={**QWEN_TYPES, "num_key_value_heads": 32},
    derive=derive_qwen(lambda config, index: index >= config.max_window_layers),
    qkv_bias=True,
    windows=Windows.BY_TYPE,
)
QWEN3: Final = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    entries={**QWEN2.entries, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=HeadNorms.ONE_FOR_EACH,
)
QWEN_EXPERTS: Final = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
QWEN_MOE: Final = Moe(
    normalized="norm_topk_prob", num_experts="num_experts", inner="moe_intermediate_size", in_layer=is_sparse
)
DEEPSEEK_MOE: Final = Moe(
    scoring="sigmoid",
    selection_bias="gate.e_score_correction_bias",
    num_groups=lambda config: int(config.n_group or 1),
    top_groups=lambda config: int(config.topk_group or 1),
    normalized="norm_topk_prob",
    least_sum=lambda config: 1e-20,
    scale=lambda config: float(config.routed_scaling_factor),
    num_experts="n_routed_experts",
    inner="moe_intermediate_size",
    shared="shared_experts",
    shared_inner=lambda config: config.moe_intermediate_size * config.n_shared_experts,
    in_layer=lambda config, index: index >= config.first_k_dense_replace,
)
LAYER_BEHIND: Final = NextToken(
    base=lambda config: f"model.layers.{config.num_hidden_layers}.",
    layer="",
    input="eh_proj",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    norm="shared_head.norm",
)
"""The next-token layer of GLM and DeepSeek, which is stored as one layer more."""
TRANSPOSED: Final = "transposed_experts"
"""Set where a checkpoint of several models has them (`text_model.py`)."""

LFM2: Final = replace(
    BARE,
    architecture="Lfm2ForCausalLM",
    entries={
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "tie_embedding": None,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_ff_dim": None,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
        "layer_types": None,
    },
    derive=derive_lfm2,
    layer_types=frozenset({"full_attention", "conv"}),
    eps="norm_eps",
    final_norm="embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="out_proj",
    head_norms=HeadNorms.ONE_FOR_EACH,
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    conv="conv",
    state_lengths={"conv": short_conv_length},
    theta=1_000_000.0,
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)
