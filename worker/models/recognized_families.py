"""Families of models: how the Hugging Face modules of each are to be read as a decoder layout. What an entry claims is
proved at every load (`proof.py`), so a family whose code changes is served by the HF backend, not wrongly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, Literal

from holdfast.worker.executors.layout import QueryScale

Scale = Callable[[Any], float]
"""A constant of a model, by its Hugging Face config."""


class NormKind(Enum):
    """A norm's formula, and where its weights are."""

    RMS = auto()
    RMS_PLUS_ONE = auto()
    """The weights are stored less one."""
    LAYER = auto()
    LAYER_PLUS_ONE = auto()
    LAYER_WITHOUT_WEIGHTS = auto()


class QkvPacking(Enum):
    """How the outputs of a family's linears follow each other."""

    APART = auto()
    """Three linears; or one of all queries, then all keys, then all values."""
    HEAD_BY_HEAD = auto()
    """One linear: query, key and value of the first head, then of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the MLP, in the layers that have one."""

    router: str = "gate"
    scoring: Literal["softmax", "softmax_of_top", "sigmoid"] = "softmax"
    selection_bias: str | None = None
    """Where it is inside the block of experts."""
    num_groups: Callable[[Any], int] = lambda config: 1
    top_groups: Callable[[Any], int] = lambda config: 1
    normalized: Callable[[Any], bool] = lambda config: True
    """By the Hugging Face config, as the four beside it."""
    least_sum: Scale = lambda config: 0.0
    scale: Scale = lambda config: 1.0
    """Of the weights of all experts."""
    scales: str | None = None
    """Where those of each expert are inside the block, instead."""
    shared: str | None = None
    shared_gate: str | None = None
    clamped: bool = False
    """The experts have gpt-oss's clamped SwiGLU, gate and up interleaved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeBeside:
    """A mixture of experts beside the MLP, in layers where there is one. Names of modules inside the layer."""

    moe: Moe
    norm: str
    out_norm: str
    mlp_out_norm: str
    router_scale: str
    """Weights of the router's norm, inside the router; they are multiplied by the root of the hidden size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of modules inside a layer, and what else its kind does. The defaults are those of llama."""

    final_norm: str = "norm"
    norm: NormKind = NormKind.RMS
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    parallel: Callable[[Any], bool] = lambda config: False
    """Attention and MLP read the same residual. By the config."""
    shared_norm: bool = False
    """Where they do, they also share `attention_norm`."""
    attention: str = "self_attn"
    head_dim: str = "head_dim"
    """An attribute of the attention module."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    packing: QkvPacking = QkvPacking.APART
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    """Both only where the modules are there."""
    value_norm: str | None = None
    """A norm without weights."""
    norms_after_rotation: bool = False
    query_scale: Callable[[Any], QueryScale | None] = lambda config: None
    """By the config."""
    interleaved: bool = False
    """Rotary pairs are neighbours."""
    rotates: Callable[[Any], bool] = lambda attention: True
    """Whether a layer has position embeddings at all, by its attention module."""
    window: Callable[[Any], int | None] = lambda attention: None
    """A layer's sliding window, by its attention module."""
    softcap: str | None = None
    """The setting of the config that caps attention scores."""
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name: gate and up fused, gate first; without a gate, the name of the first linear."""
    has_gate: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    moe: Moe | None = None
    beside: MoeBeside | None = None
    output_scale: str | None = None
    """A tensor of a layer, of one number."""
    embedding_scale: Scale = lambda config: 1.0
    logit_scale: Scale = lambda config: 1.0
    residual_scale: Scale = lambda config: 1.0
    logit_softcap: str | None = None
    """The setting of the config that caps logits."""
    keeps_state: bool = False
    """Some layers keep a state in place of keys and values: it is read from its files alone (`stated_layout.py`)."""


def _own_window(attention: Any) -> int | None:
    window: int | None = getattr(attention, "sliding_window", None)
    return window


def _config_window(attention: Any) -> int | None:
    window: int | None = getattr(attention.config, "sliding_window", None)
    return window


def _has_own_window(attention: Any) -> bool:
    return attention.sliding_window is not None


def _exaone_window(attention: Any) -> int | None:
    window: int | None = attention.sliding_window if attention.is_sliding else None
    return window


def _exaone_rotates(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


def _llama4_scale(config: Any) -> QueryScale | None:
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScale(beta=float(beta), length=int(length)) if beta else None


_LLAMA: Final = Family()
_WINDOWED: Final = Family(window=_own_window)
_GEMMA: Final = Family(norm=NormKind.RMS_PLUS_ONE)
_GEMMA2: Final = Family(
    norm=NormKind.RMS_PLUS_ONE,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    window=_own_window,
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
_NORMS_AFTER: Final = Family(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
_FUSED_MLP: Final = Family(gate_up=("gate_up_proj",), activation="activation_fn")
_COHERE: Final = Family(
    norm=NormKind.LAYER,
    mlp_norm=None,
    parallel=lambda config: True,
    shared_norm=True,
    interleaved=True,
    logit_scale=lambda config: float(config.logit_scale),
)
_GRANITE: Final = Family(
    embedding_scale=lambda config: float(config.embedding_multiplier),
    residual_scale=lambda config: float(config.residual_multiplier),
    logit_scale=lambda config: 1.0 / config.logits_scaling,
)
_NORMALIZED_IF_SET: Final = Moe(normalized=lambda config: bool(config.norm_topk_prob))
_SIGMOID_OF_GROUPS: Final = Moe(
    scoring="sigmoid",
    selection_bias="gate.e_score_correction_bias",
    num_groups=lambda config: int(config.n_group),
    top_groups=lambda config: int(config.topk_group),
    normalized=lambda config: bool(config.norm_topk_prob),
    least_sum=lambda config: 1e-20,
    scale=lambda config: float(config.routed_scaling_factor),
    shared="shared_experts",
)
_HUNYUAN: Final = Family(query_norm="query_layernorm", key_norm="key_layernorm", norms_after_rotation=True)

FAMILIES: Final[Mapping[str, Family]] = {
    "arcee": replace(_LLAMA, gate_up=("up_proj",), has_gate=False),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, window=_own_window, rotates=_has_own_window),
    "cwm": _WINDOWED,
    "ernie4_5": replace(_LLAMA, interleaved=True),
    "ernie4_5_moe": replace(
        _LLAMA,
        interleaved=True,
        moe=Moe(
            selection_bias="gate.moe_statics.e_score_correction_bias",
            least_sum=lambda config: float(config.moe_norm_min),
            shared="shared_experts",
        ),
    ),
    "exaone4": replace(_NORMS_AFTER, window=_exaone_window, rotates=_exaone_rotates),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, softcap=None),
    "gemma4_text": replace(
        _GEMMA2,
        norm=NormKind.RMS,
        softcap=None,
        value_norm="v_norm",
        output_scale="layer_scalar",
        beside=MoeBeside(
            moe=Moe(router="router", scales="router.per_expert_scale"),
            norm="pre_feedforward_layernorm_2",
            out_norm="post_feedforward_layernorm_2",
            mlp_out_norm="post_feedforward_layernorm_1",
            router_scale="router.scale",
        ),
    ),
    "glm": replace(_FUSED_MLP, interleaved=True),
    "glm4": replace(
        _FUSED_MLP,
        interleaved=True,
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
    ),
    "glm4_moe": replace(_LLAMA, moe=_SIGMOID_OF_GROUPS),
    "gpt_neox": Family(
        final_norm="final_layer_norm",
        norm=NormKind.LAYER,
        parallel=lambda config: bool(config.use_parallel_residual),
        attention="attention",
        head_dim="head_size",
        qkv=("query_key_value",),
        packing=QkvPacking.HEAD_BY_HEAD,
        output="dense",
        gate_up=("dense_h_to_4h",),
        has_gate=False,
        down="dense_4h_to_h",
        activation="act",
    ),
    "gpt_oss": replace(_WINDOWED, moe=Moe(router="router", scoring="softmax_of_top", clamped=True)),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, mlp="block_sparse_moe", moe=Moe(router="router", scoring="softmax_of_top")),
    "helium": replace(_LLAMA, interleaved=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(_HUNYUAN, moe=Moe(shared="shared_mlp")),
    "lfm2": Family(
        final_norm="embedding_norm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        output="out_proj",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
        keeps_state=True,
    ),
    "llama": _LLAMA,
    "minimax_m2": replace(_LLAMA, moe=Moe(scoring="sigmoid", selection_bias="e_score_correction_bias")),
    "ministral": _WINDOWED,
    "ministral3": replace(_LLAMA, window=_config_window, query_scale=_llama4_scale),
    "mistral": replace(_LLAMA, window=_config_window),
    "mixtral": replace(_LLAMA, window=_config_window, moe=Moe()),
    "nemotron": Family(norm=NormKind.LAYER_PLUS_ONE, gate_up=("up_proj",), has_gate=False),
    "olmo": Family(norm=NormKind.LAYER_WITHOUT_WEIGHTS),
    "olmo2": _NORMS_AFTER,
    "olmo3": replace(_NORMS_AFTER, window=_own_window),
    "olmoe": replace(_LLAMA, window=_config_window, moe=_NORMALIZED_IF_SET),
    "phi": Family(
        final_norm="final_layernorm",
        norm=NormKind.LAYER,
        mlp_norm=None,
        parallel=lambda config: True,
        shared_norm=True,
        output="dense",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        gate_up=("fc1",),
        has_gate=False,
        down="fc2",
        activation="activation_fn",
    ),
    "phi3": replace(_FUSED_MLP, qkv=("qkv_proj",), window=_config_window),
    "qwen2": _WINDOWED,
    "qwen2_moe": replace(
        _WINDOWED, moe=replace(_NORMALIZED_IF_SET, shared="shared_expert", shared_gate="shared_expert_gate")
    ),
    "qwen3": _WINDOWED,
    "qwen3_moe": replace(_WINDOWED, moe=_NORMALIZED_IF_SET),
    "seed_oss": _LLAMA,
    "smollm3": replace(_WINDOWED, rotates=lambda attention: bool(attention.use_rope)),
    "stablelm": Family(
        norm=NormKind.LAYER,
        parallel=lambda config: bool(config.use_parallel_residual),
        shared_norm=True,
        query_norm="q_layernorm",
        key_norm="k_layernorm",
    ),
    "starcoder2": Family(
        norm=NormKind.LAYER,
        gate_up=("c_fc",),
        has_gate=False,
        down="c_proj",
        activation="act",
        window=_config_window,
    ),
}
"""By `model_type` of the Hugging Face config."""
