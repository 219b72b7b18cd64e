"""Families of models, stated: what transformers' code of each `model_type` computes, as data. The tests prove each
entry with the pinned transformers (docs/add-a-model.md); a model of another type runs on the HF backend.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from holdfast.worker.executors.layout import QueryScale
from holdfast.worker.models.delta_net_families import DELTA_NETS
from holdfast.worker.models.family import Family, HeadNorms, Moe, MoeBeside, NormKind, Packing, Windows, is_sparse


def _layer_types(kind_of: Callable[[Any, int], bool]) -> Callable[[Any], None]:
    """Derives `layer_types` where config.json has none: whether a layer has a window, by config and index."""

    def derive(config: Any) -> None:
        if config.layer_types is None:
            config.layer_types = [
                "sliding_attention" if kind_of(config, index) else "full_attention"
                for index in range(config.num_hidden_layers)
            ]

    return derive


def _full_every(count: int) -> Callable[[Any], None]:
    """Each layer whose number is a multiple of `count` has no window."""
    return _layer_types(lambda config, index: bool((index + 1) % count))


def _slides_by_pattern(config: Any, index: int) -> bool:
    return bool(config.sliding_window_pattern and (index + 1) % config.sliding_window_pattern)


_FULL_BY_PATTERN: Final = _layer_types(_slides_by_pattern)


def _derive_gemma4(config: Any) -> None:
    """Layers without a window have heads of another size, and maybe another number of KV heads."""
    _full_every(6)(config)
    config.layer_types = [*config.layer_types[:-1], "full_attention"]
    full = {"head_dim": config.global_head_dim}
    if config.attention_k_eq_v and config.num_global_key_value_heads is not None:
        full["num_key_value_heads"] = config.num_global_key_value_heads
    own = config.per_layer_config
    if own is None:
        own = {str(index): full for index, kind in enumerate(config.layer_types) if kind == "full_attention"}
    heads = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    config.is_heterogeneous = True
    config.per_layer_config = [
        SimpleNamespace(**{**heads, **own.get(str(index), {})}) for index in range(config.num_hidden_layers)
    ]


def _derive_qwen(kind_of: Callable[[Any, int], bool]) -> Callable[[Any], None]:
    """Windows are off unless config.json sets them on."""

    def derive(config: Any) -> None:
        config.sliding_window = config.sliding_window if config.use_sliding_window else None
        _layer_types(lambda config, index: config.sliding_window is not None and kind_of(config, index))(config)

    return derive


def _derive_smollm3(config: Any) -> None:
    if config.no_rope_layers is None:
        interval = config.no_rope_layer_interval
        config.no_rope_layers = [int((index + 1) % interval != 0) for index in range(config.num_hidden_layers)]
    _derive_qwen(lambda config, index: not config.no_rope_layers[index])(config)


def _derive_lfm2(config: Any) -> None:
    config.hidden_act, config.head_dim = "silu", None
    config.tie_word_embeddings = config.tie_word_embeddings if config.tie_embedding is None else config.tie_embedding
    inner = config.intermediate_size if config.block_ff_dim is None else config.block_ff_dim
    if config.block_auto_adjust_ff_dim:
        inner, unit = int(config.block_ffn_dim_multiplier * int(2 * inner / 3)), config.block_multiple_of
        inner = -(-inner // unit) * unit
    config.intermediate_size = inner
    if config.layer_types is None:
        attending = range(config.num_hidden_layers) if config.full_attn_idxs is None else config.full_attn_idxs
        config.layer_types = [
            "full_attention" if index in attending else "conv" for index in range(config.num_hidden_layers)
        ]


def _short_conv_length(config: Any, num_drafts: int) -> int:
    return int(config.hidden_size) * (int(config.conv_L_cache) - 1 + num_drafts)


def _has_window(config: Any, index: int) -> bool:
    return config.sliding_window is not None and config.layer_types[index] == "sliding_attention"


def _derive_ernie(config: Any) -> None:
    if config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def _is_between(config: Any, index: int) -> bool:
    is_within: bool = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    return is_within and (index + 1) % config.moe_layer_interval == 0


def _llama4_scale(config: Any) -> QueryScale | None:
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScale(beta=float(beta), length=int(length)) if beta else None


_BIASES: Final = {"attention_bias": False, "mlp_bias": False}
_TYPES: Final = {"sliding_window": 4096, "layer_types": None}
_QWEN_TYPES: Final = {**_TYPES, "use_sliding_window": False, "max_window_layers": 28, "eos_token_id": None}
_EXPERTS: Final = {"num_experts_per_tok": 2, "num_local_experts": 8}

_LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    entries=_BIASES,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_PLAIN: Final = replace(_LLAMA, entries={"attention_bias": False}, mlp_bias=False)
"""Attention may have biases, the MLP has none."""
_BARE: Final = replace(_PLAIN, entries={}, qkv_bias=False, output_bias=False)
_GEMMA: Final = replace(
    _PLAIN,
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
_GEMMA2: Final = replace(
    _GEMMA,
    architecture="Gemma2ForCausalLM",
    entries={
        **_GEMMA.entries,
        **_TYPES,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    derive=_full_every(2),
    activation="hidden_activation",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    scaling=lambda config: float(config.query_pre_attn_scalar**-0.5),
    windows=Windows.BY_TYPE,
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
_COHERE: Final = replace(
    _PLAIN,
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
_ERNIE: Final = replace(
    _LLAMA,
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
_GRANITE: Final = replace(
    _LLAMA,
    architecture="GraniteForCausalLM",
    entries={
        **_BIASES,
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
_GLM: Final = replace(
    _BARE,
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
_OLMO: Final = replace(
    _PLAIN,
    architecture="OlmoForCausalLM",
    entries={"eos_token_id": 50279, "attention_bias": False},
    norm=NormKind.LAYER_WITHOUT_WEIGHTS,
)
_OLMO2: Final = replace(
    _OLMO,
    architecture="Olmo2ForCausalLM",
    entries={**_OLMO.entries, "rms_norm_eps": 1e-5},
    norm=NormKind.RMS,
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
    head_norms=HeadNorms.ONE_FOR_ALL,
)
_HUNYUAN: Final = replace(
    _PLAIN,
    architecture="HunYuanDenseV1ForCausalLM",
    entries={"rms_norm_eps": 1e-5, "attention_bias": False},
    head_norms=HeadNorms.ONE_FOR_EACH,
    query_norm="query_layernorm",
    key_norm="key_layernorm",
    norms_after_rotation=True,
    rope_kinds={"dynamic": "ntk_alpha"},
)
_MISTRAL: Final = replace(
    _BARE,
    architecture="MistralForCausalLM",
    entries={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=Windows.ALL,
)
_QWEN2: Final = replace(
    _BARE,
    architecture="Qwen2ForCausalLM",
    entries={**_QWEN_TYPES, "num_key_value_heads": 32},
    derive=_derive_qwen(lambda config, index: index >= config.max_window_layers),
    qkv_bias=True,
    windows=Windows.BY_TYPE,
)
_QWEN3: Final = replace(
    _QWEN2,
    architecture="Qwen3ForCausalLM",
    entries={**_QWEN2.entries, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=HeadNorms.ONE_FOR_EACH,
)
_QWEN_EXPERTS: Final = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_QWEN_MOE: Final = Moe(
    normalized="norm_topk_prob", num_experts="num_experts", inner="moe_intermediate_size", in_layer=is_sparse
)
_TRANSPOSED: Final = "transposed_experts"
"""Set where a checkpoint of several models has them (`text_model.py`)."""

FAMILIES: Final[Mapping[str, Family]] = {
    **DELTA_NETS,
    "arcee": replace(
        _LLAMA,
        architecture="ArceeForCausalLM",
        entries={
            **_BIASES,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "eos_token_id": 128001,
        },
        gate_up=("up_proj",),
        has_gate=False,
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        architecture="Cohere2ForCausalLM",
        entries={**_COHERE.entries, **_TYPES, "sliding_window_pattern": 4},
        derive=_FULL_BY_PATTERN,
        head_norms=None,
        theta=10_000.0,
        windows=Windows.BY_TYPE,
        rotates=_has_window,
    ),
    "cwm": replace(
        _BARE,
        architecture="CwmForCausalLM",
        entries={
            **_TYPES,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "eos_token_id": [128001, 128008, 128009],
            "mlp_bias": False,
        },
        mlp_bias="mlp_bias",
        derive=_layer_types(lambda config, index: index % 4 != 0),
        windows=Windows.BY_TYPE,
        theta=1_000_000.0,
        rope={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        architecture="Ernie4_5_MoeForCausalLM",
        entries={
            **_ERNIE.entries,
            "num_key_value_heads": 4,
            "head_dim": None,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        derive=_derive_ernie,
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        stored_as=((".gate.moe_statics.", ".moe_statics."),),
        unused=("mtp",),
        moe=Moe(
            exact_router=True,
            top_k="moe_k",
            selection_bias="gate.moe_statics.e_score_correction_bias",
            is_row=True,
            least_sum=lambda config: float(config.moe_norm_min),
            num_experts="moe_num_experts",
            inner="moe_intermediate_size",
            shared="shared_experts",
            shared_inner=lambda config: config.moe_intermediate_size * config.moe_num_shared_experts,
            in_layer=_is_between,
        ),
    ),
    "exaone4": replace(
        _OLMO2,
        architecture="Exaone4ForCausalLM",
        entries={**_TYPES, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
        derive=_FULL_BY_PATTERN,
        qkv_bias=False,
        output_bias=False,
        head_norms=HeadNorms.ONE_FOR_EACH,
        windows=Windows.BY_TYPE,
        rotates=lambda config, index: config.sliding_window is None or _has_window(config, index),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        entries={
            **_GEMMA2.entries,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        derive=_FULL_BY_PATTERN,
        head_norms=HeadNorms.ONE_FOR_EACH,
        softcap=None,
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "gemma4_text": replace(
        _GEMMA2,
        architecture="Gemma4ForCausalLM",
        entries={
            **_GEMMA.entries,
            **_TYPES,
            "num_key_value_heads": 4,
            "sliding_window": 512,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "per_layer_config": None,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        derive=_derive_gemma4,
        norm=NormKind.RMS,
        qkv_bias="attention_bias",
        head_norms=HeadNorms.ONE_FOR_EACH,
        scaling=lambda config: 1.0,
        softcap=None,
        norms_values=True,
        values_are_keys=lambda config, index: config.attention_k_eq_v and not _has_window(config, index),
        rope={"rope_type": "proportional", "partial_rotary_factor": 0.25},
        theta=1_000_000.0,
        local_theta=10_000.0,
        reads_old_rope=False,
        partial=1.0,
        beside=MoeBeside(
            moe=Moe(
                router="router.proj",
                top_k="top_k_experts",
                scales="router.per_expert_scale",
                num_experts="num_experts",
                inner="moe_intermediate_size",
            ),
            is_there="enable_moe_block",
            norm="pre_feedforward_layernorm_2",
            out_norm="post_feedforward_layernorm_2",
            mlp_out_norm="post_feedforward_layernorm_1",
            router_scale="router.scale",
        ),
        output_scale="layer_scalar",
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
    ),
    "glm4_moe": replace(
        _PLAIN,
        architecture="Glm4MoeForCausalLM",
        entries={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        unused=(r"^model\.layers\.{num_hidden_layers}\.",),
        output_bias=False,
        head_norms=HeadNorms.ONE_FOR_EACH,
        has_head_norms="use_qk_norm",
        partial=0.5,
        moe=Moe(
            scoring="sigmoid",
            selection_bias="gate.e_score_correction_bias",
            num_groups=lambda config: int(config.n_group),
            top_groups=lambda config: int(config.topk_group),
            normalized="norm_topk_prob",
            least_sum=lambda config: 1e-20,
            scale=lambda config: float(config.routed_scaling_factor),
            num_experts="n_routed_experts",
            inner="moe_intermediate_size",
            shared="shared_experts",
            shared_inner=lambda config: config.moe_intermediate_size * config.n_shared_experts,
            in_layer=lambda config, index: index >= config.first_k_dense_replace,
        ),
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        entries={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        base="gpt_neox.",
        embedding="embed_in",
        stored_as=(("lm_head.", "embed_out."),),
        norm=NormKind.LAYER,
        norm_bias=True,
        eps="layer_norm_eps",
        final_norm="final_layer_norm",
        parallel="use_parallel_residual",
        attention="attention",
        packing=Packing.HEAD_BY_HEAD,
        qkv=("query_key_value",),
        qkv_bias="attention_bias",
        output="dense",
        output_bias="attention_bias",
        partial=0.25,
        has_gate=False,
        gate_up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        mlp_bias=True,
    ),
    "gpt_oss": replace(
        _PLAIN,
        architecture="GptOssForCausalLM",
        entries={
            **_TYPES,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "attention_bias": True,
            "eos_token_id": None,
        },
        aliases={"num_experts": "num_local_experts"},
        derive=_full_every(2),
        windows=Windows.BY_TYPE,
        sinks=True,
        theta=150_000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        moe=Moe(router="router", has_router_bias=True, scoring="softmax_of_top", clamped=True),
    ),
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        architecture="GraniteMoeForCausalLM",
        entries={**_GRANITE.entries, **_EXPERTS},
        stored_as=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        ),
        mlp="block_sparse_moe",
        moe=Moe(router="router", scoring="softmax_of_top"),
    ),
    "helium": replace(
        _LLAMA,
        architecture="HeliumForCausalLM",
        entries={**_BIASES, "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
        output_bias=False,
        scaling=lambda config: 1 / math.sqrt(config.head_dim),
        theta=100_000.0,
        interleaved=True,
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        architecture="HunYuanMoEV1ForCausalLM",
        entries={**_HUNYUAN.entries, "num_experts": 1, "moe_topk": 1},
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        moe=Moe(
            router="gate.wg",
            exact_router=True,
            top_k="moe_topk",
            num_experts="num_experts",
            shared="shared_mlp",
            shared_inner=lambda config: config.intermediate_size,
        ),
    ),
    "lfm2": replace(
        _BARE,
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
        derive=_derive_lfm2,
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
        state_lengths={"conv": _short_conv_length},
        theta=1_000_000.0,
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    ),
    "llama": _LLAMA,
    "minimax_m2": replace(
        _BARE,
        architecture="MiniMaxM2ForCausalLM",
        entries={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rotary_dim": None,
        },
        aliases={"num_experts": "num_local_experts"},
        stored_as=((".mlp.", ".block_sparse_moe."),),
        head_norms=HeadNorms.ONE_FOR_ALL,
        theta=5_000_000.0,
        partial=1.0,
        moe=Moe(scoring="sigmoid", selection_bias="e_score_correction_bias", parts=("w1", "w3", "w2")),
    ),
    "ministral": replace(
        _MISTRAL,
        architecture="MinistralForCausalLM",
        entries={**_TYPES, "num_key_value_heads": 8},
        derive=_layer_types(lambda config, index: config.sliding_window is not None),
        windows=Windows.BY_TYPE,
    ),
    "ministral3": replace(
        _MISTRAL,
        architecture="Ministral3ForCausalLM",
        entries={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
        query_scale=_llama4_scale,
        rope={
            "type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "mistral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        entries={**_EXPERTS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None},
        aliases={"num_experts": "num_local_experts"},
        stored_as=((".mlp.", ".block_sparse_moe."),),
        theta=1_000_000.0,
        moe=Moe(parts=("w1", "w3", "w2")),
    ),
    "nemotron": replace(
        _LLAMA,
        architecture="NemotronForCausalLM",
        entries={**_BIASES, "hidden_act": "relu2", "norm_eps": 1e-5, "eos_token_id": 3},
        norm=NormKind.LAYER_PLUS_ONE,
        norm_bias=True,
        eps="norm_eps",
        partial=0.5,
        has_gate=False,
        gate_up=("up_proj",),
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        entries={**_OLMO2.entries, **_TYPES},
        derive=_full_every(4),
        windows=Windows.BY_TYPE,
        theta=500_000.0,
        local_theta=500_000.0,
    ),
    "olmoe": replace(
        _PLAIN,
        architecture="OlmoeForCausalLM",
        entries={
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "attention_bias": False,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
            "sliding_window": None,
        },
        aliases={"num_local_experts": "num_experts"},
        head_norms=HeadNorms.ONE_FOR_ALL,
        windows=Windows.ALL,
        moe=Moe(normalized="norm_topk_prob", num_experts="num_experts"),
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        entries={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
        head_bias=True,
        norm=NormKind.LAYER,
        norm_bias=True,
        eps="layer_norm_eps",
        final_norm="final_layernorm",
        mlp_norm=None,
        parallel=True,
        shared_norm=True,
        qkv_bias=True,
        output="dense",
        output_bias=True,
        head_norms=HeadNorms.ONE_FOR_EACH,
        has_head_norms="qk_layernorm",
        head_norm_bias=True,
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        partial=0.5,
        has_gate=False,
        gate_up=("fc1",),
        down="fc2",
        mlp_bias=True,
    ),
    "phi3": replace(
        _BARE,
        architecture="Phi3ForCausalLM",
        entries={
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
        },
        packing=Packing.FUSED,
        qkv=("qkv_proj",),
        windows=Windows.ALL,
        rope_kinds={"su": "longrope", "yarn": "longrope"},
        partial=1.0,
        gate_up=("gate_up_proj",),
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        architecture="Qwen2MoeForCausalLM",
        entries={
            **_QWEN2.entries,
            **_QWEN_EXPERTS,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        derive=_derive_qwen(lambda config, index: bool((index + 1) % 2) and index < config.max_window_layers),
        qkv_bias="qkv_bias",
        moe=replace(
            _QWEN_MOE,
            shared="shared_expert",
            shared_inner=lambda config: config.shared_expert_intermediate_size,
            shared_gate="shared_expert_gate",
        ),
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        entries={
            **_QWEN3.entries,
            **_QWEN_EXPERTS,
            "head_dim": None,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            _TRANSPOSED: False,
        },
        aliases={"num_local_experts": "num_experts"},
        windows=Windows.ALL,
        moe=replace(_QWEN_MOE, transposed=_TRANSPOSED),
    ),
    "seed_oss": replace(
        _LLAMA,
        architecture="SeedOssForCausalLM",
        entries={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        output_bias="attention_out_bias",
    ),
    "smollm3": replace(
        _LLAMA,
        architecture="SmolLM3ForCausalLM",
        entries={
            **_BIASES,
            **_QWEN_TYPES,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        derive=_derive_smollm3,
        windows=Windows.BY_TYPE,
        theta=2_000_000.0,
        rotates=lambda config, index: bool(config.no_rope_layers[index]),
    ),
    "stablelm": replace(
        _BARE,
        architecture="StableLmForCausalLM",
        entries={
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "eos_token_id": 0,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
        },
        norm=NormKind.LAYER,
        norm_bias=True,
        eps="layer_norm_eps",
        parallel="use_parallel_residual",
        shared_norm=True,
        qkv_bias="use_qkv_bias",
        head_norms=HeadNorms.OWN_APART,
        has_head_norms="qk_layernorm",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        partial=0.25,
    ),
    "starcoder2": replace(
        _MISTRAL,
        architecture="Starcoder2ForCausalLM",
        entries={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "sliding_window": None,
            "use_bias": True,
        },
        norm=NormKind.LAYER,
        norm_bias=True,
        eps="norm_epsilon",
        qkv_bias="use_bias",
        output_bias="use_bias",
        has_gate=False,
        gate_up=("c_fc",),
        down="c_proj",
        mlp_bias="use_bias",
    ),
}
"""By `model_type` of config.json."""
