"""Configs of families that are stated key by key: config.json as transformers reads it, without transformers.

A key or a value that is not stated is a reason to build Hugging Face's modules instead (`NotStated`), never a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch

from holdfast.worker.executors.layout import MAX_CONV_WIDTH

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""By their names in config.json."""

_REQUIRED: Final = object()

_IGNORED: Final = frozenset(
    {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
    | {"attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "bos_token_id", "pad_token_id"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "is_llama_config", "transformers.js_config"}
    | {"_model_name_or_path", "unk_token_id", "unsloth_fixed", "unsloth_version", "quantization_config"}
)
"""Keys that change nothing of a model's logits, or that are read by themselves."""

_ROPE_KEYS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset({"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"})
        | {"mscale", "mscale_all_dim", "truncate"},
    ),
}
"""By kind of rotary angles: the keys that it needs, and those that it may have besides."""

_LENGTH_IS_ORIGINAL: Final = ("llama3", "yarn")
"""Kinds whose original length is that of the model where none is given."""


class NotStated(Exception):
    """The checkpoint is not of a form that is stated. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of config.json."""

    accepts: Callable[[Any], bool]
    """Which values are understood."""
    default: Any = _REQUIRED
    """The value where the key is missing, as transformers has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedFamily:
    """A family whose layout follows from its config alone, together with its entry in `families.py`."""

    architecture: str
    settings: Mapping[str, Setting]
    complete: Callable[[Any], None] = lambda config: None
    """Derives values from others, as transformers' config does."""
    theta: float = 10_000.0
    """The base of the rotary angles where config.json has none."""
    qkv_bias: Callable[[Any], bool] = lambda config: False
    output_bias: Callable[[Any], bool] = lambda config: False
    mlp_bias: Callable[[Any], bool] = lambda config: False
    has_head_norms: bool = False
    scales_embedding: bool = False
    """By the square root of the hidden size, rounded to the dtypes of the checkpoint and of serving."""
    scaling: Callable[[Any], float] = lambda config: float(config.head_dim**-0.5)
    """Of attention scores."""


def read_stated_config(raw: Mapping[str, Any]) -> Any:
    """The values of a config.json, by the names that a Hugging Face config has for them; and `dtype`, a torch dtype.

    Raises `NotStated`.
    """
    family = STATED.get(str(raw.get("model_type")))
    if family is None:
        raise NotStated(f"model type {raw.get('model_type')!r} is not stated")
    if raw.get("architectures") not in (None, [family.architecture]):
        raise NotStated(f"its architectures are {raw['architectures']}")
    if unknown := sorted(raw.keys() - family.settings.keys() - _IGNORED):
        raise NotStated(f"config.json has {', '.join(unknown)}")
    values = {key: _value(raw, key, setting) for key, setting in family.settings.items()}
    config = SimpleNamespace(model_type=raw["model_type"], dtype=_dtype(raw), **values)
    if config.hidden_size % config.num_attention_heads:
        raise NotStated("its hidden size is not a multiple of its heads")
    family.complete(config)
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.head_dim is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        raise NotStated("its heads have an odd size, or share KV heads unevenly")
    config.rope_parameters = _rope_parameters(raw, config, family.theta)
    return config


def _value(raw: Mapping[str, Any], key: str, setting: Setting) -> Any:
    value = raw.get(key, setting.default)
    if value is _REQUIRED:
        raise NotStated(f"config.json has no {key}")
    if key in raw and not setting.accepts(value):
        raise NotStated(f"config.json has {key} = {value!r}")
    return value


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    written = [raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None]
    if len(written) != 1 or str(written[0]) not in DTYPES:
        raise NotStated(f"config.json has dtype = {written}")
    return DTYPES[str(written[0])]


def _rope_parameters(raw: Mapping[str, Any], config: Any, theta: float) -> dict[str, Any]:
    """The parameters of the rotary angles, complete."""
    given = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    if len(given) > 1 or not all(isinstance(item, Mapping) for item in given):
        raise NotStated("config.json has rotary angles in two forms")
    rope = dict(given[0]) if given else {}
    kinds = {rope.pop(key) for key in ("rope_type", "type") if isinstance(rope.get(key), str)} or {"default"}
    kind = kinds.pop()
    if kinds or kind not in _ROPE_KEYS:
        raise NotStated(f"its rotary angles are of kind {kind}")
    rope.setdefault("rope_theta", raw.get("rope_theta", theta))
    needed, optional = _ROPE_KEYS[kind]
    if not needed | {"rope_theta"} <= rope.keys() <= needed | optional | {"rope_theta"}:
        raise NotStated(f"its rotary angles of kind {kind} have {', '.join(sorted(rope))}")
    if kind in _LENGTH_IS_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if "truncate" in rope and not isinstance(rope["truncate"], bool):
        raise NotStated("truncate of its rotary angles is not a boolean")
    for key, value in rope.items():
        if key != "truncate" and not _is_positive(value):
            raise NotStated(f"its rotary angles have {key} = {value!r}")
    return {"rope_type": kind, **rope}


# --- kinds of values ---


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_float(value: Any) -> bool:
    return type(value) is float and 0 < value < 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_tokens(value: Any) -> bool:
    return value is None or _is_token(value) or (isinstance(value, list) and all(map(_is_token, value)))


def _or_none(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in values)


def _are_layer_types(value: Any) -> bool:
    return isinstance(value, list) and all(item in ("full_attention", "sliding_attention") for item in value)


# --- families ---

_COUNT: Final = Setting(accepts=_is_count)
_OFF: Final = Setting(accepts=_is_flag, default=False)
_COMMON: Final[Mapping[str, Setting]] = {
    "vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "intermediate_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": Setting(accepts=_or_none(_is_count), default=None),
    "head_dim": Setting(accepts=_or_none(_is_count), default=None),
    "hidden_act": Setting(accepts=_only("silu"), default="silu"),
    "max_position_embeddings": _COUNT,
    "rms_norm_eps": Setting(accepts=_is_float, default=1e-6),
    "tie_word_embeddings": _OFF,
    "eos_token_id": Setting(accepts=_are_tokens, default=2),
}
_LLAMA: Final = StatedFamily(
    architecture="LlamaForCausalLM",
    settings={
        **_COMMON,
        "attention_bias": _OFF,
        "mlp_bias": _OFF,
        "rope_interleaved": Setting(accepts=_only(False), default=False),
    },
    qkv_bias=lambda config: bool(config.attention_bias),
    output_bias=lambda config: bool(config.attention_bias),
    mlp_bias=lambda config: bool(config.mlp_bias),
)
_QWEN: Final[Mapping[str, Setting]] = {
    **_COMMON,
    "num_key_value_heads": Setting(accepts=_or_none(_is_count), default=32),
    "eos_token_id": Setting(accepts=_are_tokens, default=None),
    "use_sliding_window": _OFF,
    "sliding_window": Setting(accepts=_or_none(_is_count), default=4096),
    "max_window_layers": Setting(accepts=_is_token, default=28),
    "use_mrope": Setting(accepts=_only(False), default=False),
    "layer_types": Setting(accepts=_or_none(_are_layer_types), default=None),
}


def _complete_qwen(config: Any) -> None:
    _turn_windows_off(config)
    if config.layer_types is None:
        first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
        config.layer_types = [
            "full_attention" if index < first else "sliding_attention" for index in range(config.num_hidden_layers)
        ]
    _check_layer_types(config)


def _turn_windows_off(config: Any) -> None:
    config.sliding_window = config.sliding_window if config.use_sliding_window else None


def _check_layer_types(config: Any) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        raise NotStated(f"it has {len(config.layer_types)} layer_types and {config.num_hidden_layers} layers")


def _complete_smollm3(config: Any) -> None:
    _turn_windows_off(config)
    if config.no_rope_layers is None:
        interval = config.no_rope_layer_interval
        config.no_rope_layers = [int((index + 1) % interval != 0) for index in range(config.num_hidden_layers)]
    if len(config.no_rope_layers) != config.num_hidden_layers:
        raise NotStated(f"it has {len(config.no_rope_layers)} no_rope_layers and {config.num_hidden_layers} layers")
    if config.layer_types is None:
        slides = config.sliding_window is not None
        config.layer_types = [
            "sliding_attention" if slides and not rotates else "full_attention" for rotates in config.no_rope_layers
        ]
    _check_layer_types(config)


def _are_lfm2_layer_types(value: Any) -> bool:
    return isinstance(value, list) and all(item in ("full_attention", "conv") for item in value)


def _complete_lfm2(config: Any) -> None:
    config.rms_norm_eps, config.hidden_act, config.head_dim = config.norm_eps, "silu", None
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
    _check_layer_types(config)


def _are_bits(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item in (0, 1) for item in value)


_GRANITE_SCALES: Final = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

_LFM2_IGNORED: Final = (
    *("block_dim", "block_norm_eps", "block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
)
"""What its files say besides, which transformers does not read."""

STATED: Final[Mapping[str, StatedFamily]] = {
    "gemma": StatedFamily(
        architecture="GemmaForCausalLM",
        settings={
            **_COMMON,
            "num_key_value_heads": Setting(accepts=_is_count, default=16),
            "head_dim": Setting(accepts=_is_count, default=256),
            "hidden_act": Setting(accepts=_only("gelu_pytorch_tanh", "gelu"), default="gelu_pytorch_tanh"),
            "hidden_activation": Setting(accepts=_only(None, "gelu_pytorch_tanh"), default=None),
            "tie_word_embeddings": Setting(accepts=_is_flag, default=True),
            "eos_token_id": Setting(accepts=_are_tokens, default=1),
            "attention_bias": _OFF,
            "use_bidirectional_attention": Setting(accepts=_only(None, False), default=None),
        },
        qkv_bias=lambda config: bool(config.attention_bias),
        output_bias=lambda config: bool(config.attention_bias),
        scales_embedding=True,
    ),
    "granite": StatedFamily(
        architecture="GraniteForCausalLM",
        settings={
            **_COMMON,
            "head_dim": Setting(accepts=_is_count, default=None),
            "attention_bias": _OFF,
            "mlp_bias": _OFF,
            **dict.fromkeys(_GRANITE_SCALES, Setting(accepts=_is_positive, default=1.0)),
        },
        qkv_bias=lambda config: bool(config.attention_bias),
        output_bias=lambda config: bool(config.attention_bias),
        mlp_bias=lambda config: bool(config.mlp_bias),
        scaling=lambda config: float(config.attention_multiplier),
    ),
    "lfm2": StatedFamily(
        architecture="Lfm2ForCausalLM",
        settings={
            **{key: _COMMON[key] for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")},
            **{key: _COMMON[key] for key in ("vocab_size", "hidden_size")},
            "intermediate_size": Setting(accepts=_is_count, default=12288),
            "num_key_value_heads": Setting(accepts=_is_count, default=8),
            "eos_token_id": Setting(accepts=_are_tokens, default=2),
            "tie_word_embeddings": Setting(accepts=_is_flag, default=True),
            "tie_embedding": Setting(accepts=_is_flag, default=None),
            "norm_eps": Setting(accepts=_is_float, default=1e-5),
            "conv_bias": _OFF,
            "conv_L_cache": Setting(accepts=lambda value: _is_count(value) and 2 <= value <= MAX_CONV_WIDTH, default=3),
            "block_ff_dim": Setting(accepts=_is_count, default=None),
            "block_multiple_of": Setting(accepts=_is_count, default=256),
            "block_ffn_dim_multiplier": Setting(accepts=_is_positive, default=1.0),
            "block_auto_adjust_ff_dim": Setting(accepts=_is_flag, default=True),
            "full_attn_idxs": Setting(accepts=_or_none(_are_tokens), default=None),
            "layer_types": Setting(accepts=_or_none(_are_lfm2_layer_types), default=None),
            **dict.fromkeys(_LFM2_IGNORED, Setting(accepts=lambda value: True, default=None)),
        },
        complete=_complete_lfm2,
        theta=1_000_000.0,
        has_head_norms=True,
    ),
    "llama": _LLAMA,
    "mistral": StatedFamily(
        architecture="MistralForCausalLM",
        settings={
            **_COMMON,
            "num_key_value_heads": Setting(accepts=_or_none(_is_count), default=8),
            "sliding_window": Setting(accepts=_or_none(_is_count), default=4096),
        },
    ),
    "qwen2": StatedFamily(
        architecture="Qwen2ForCausalLM",
        settings={**_QWEN, "head_dim": Setting(accepts=_is_count, default=None)},
        complete=_complete_qwen,
        qkv_bias=lambda config: True,
    ),
    "qwen3": StatedFamily(
        architecture="Qwen3ForCausalLM",
        settings={
            **_QWEN,
            "head_dim": Setting(accepts=_is_count, default=128),
            "attention_bias": _OFF,
        },
        complete=_complete_qwen,
        qkv_bias=lambda config: bool(config.attention_bias),
        output_bias=lambda config: bool(config.attention_bias),
        has_head_norms=True,
    ),
    "smollm3": StatedFamily(
        architecture="SmolLM3ForCausalLM",
        settings={
            **_COMMON,
            "num_key_value_heads": Setting(accepts=_or_none(_is_count), default=4),
            "head_dim": Setting(accepts=_is_count, default=None),
            "tie_word_embeddings": Setting(accepts=_is_flag, default=True),
            "eos_token_id": Setting(accepts=_are_tokens, default=128001),
            "attention_bias": _OFF,
            "mlp_bias": _OFF,
            "use_sliding_window": _OFF,
            "sliding_window": Setting(accepts=_or_none(_is_count), default=None),
            "layer_types": Setting(accepts=_or_none(_are_layer_types), default=None),
            "no_rope_layers": Setting(accepts=_or_none(_are_bits), default=None),
            "no_rope_layer_interval": Setting(accepts=_is_count, default=4),
            "max_window_layers": Setting(accepts=_is_token, default=None),
        },
        complete=_complete_smollm3,
        theta=2_000_000.0,
        qkv_bias=lambda config: bool(config.attention_bias),
        output_bias=lambda config: bool(config.attention_bias),
        mlp_bias=lambda config: bool(config.mlp_bias),
    ),
}
"""By `model_type`."""
