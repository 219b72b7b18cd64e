"""Configs of stated families: config.json as transformers reads it, without transformers.

Entries that the family does not name are ignored, as transformers' code ignores them
(`tests/worker/models/test_stated_config.py` watches its reads). A value that is not understood is a reason for the HF
backend (`NotStated`), never a guess.
"""

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, Final

from holdfast.worker.executors.layout import MAX_CONV_WIDTH
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family import REQUIRED, Family
from holdfast.worker.models.weights import torch_dtype

_ROPE_NEEDS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "proportional": frozenset(),
    "dynamic": frozenset({"factor"}),
    "ntk_alpha": frozenset({"alpha"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor"}),
    "longrope": frozenset({"short_factor", "long_factor"}),
}
"""Entries needed by each kind of rotary angles. Angles are a function of the position alone; for dynamic and longrope
up to the length that a model is served with at most (`worker/models/checks.py`)."""

_LENGTH_IS_ORIGINAL: Final = ("llama3", "yarn", "longrope")
"""Kinds whose original length defaults to the model's."""


class NotStated(Exception):
    """The checkpoint is not of a form that is stated. The message is the reason."""


def read_stated_config(raw: Mapping[str, Any], overrides: Collection[str] = ()) -> Any:
    """The values of a config.json, by the names that a Hugging Face config has for them; and `dtype`, a torch dtype, or
    None where config.json names none. `overrides`: entries that must be known.

    Raises `NotStated`, and `ConfigurationError` for a dtype that no model is served in.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise NotStated(f"model type {raw.get('model_type')!r} is not among the stated families")
    if raw.get("architectures") not in (None, [family.architecture]):
        raise NotStated(f"its architectures are {raw['architectures']}")
    raw = {**raw, **{ours: raw[theirs] for theirs, ours in family.aliases.items() if theirs in raw}}
    _check_fixed(raw, {**_FIXED, **family.fixed})
    entries = {**_COMMON, **family.entries}
    if unknown := sorted(set(overrides) - entries.keys() - _READ_APART):
        raise NotStated(f"model.hf_overrides has {', '.join(unknown)}")
    values = {key: _value(raw, key, default) for key, default in entries.items()}
    config = SimpleNamespace(model_type=raw["model_type"], dtype=torch_dtype(raw), **values)
    family.derive(config)
    _complete_heads(config)
    _check_layers(config, family)
    config.rope_parameters = _rope_by_type(raw, family, config)
    return config


def _check_fixed(raw: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    for key, understood in fixed.items():
        if key in raw and raw[key] not in understood:
            raise NotStated(f"config.json has {key} = {raw[key]!r}")


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key, default)
    if value is REQUIRED:
        raise NotStated(f"config.json has no {key}")
    if key in raw and not _KINDS[key](value) and value is not default:
        raise NotStated(f"config.json has {key} = {value!r}")
    return value


def _complete_heads(config: Any) -> None:
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            raise NotStated("its hidden size is not a multiple of its heads")
        config.head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        raise NotStated("its heads have an odd size, or share KV heads unevenly")


def _check_layers(config: Any, family: Family) -> None:
    for key in ("layer_types", "no_rope_layers"):
        found = getattr(config, key, None)
        if found is not None and len(found) != config.num_hidden_layers:
            raise NotStated(f"it has {len(found)} {key} and {config.num_hidden_layers} layers")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - family.layer_types):
        raise NotStated(f"it has {', '.join(others)} layers")
    if num_shared := getattr(config, "num_kv_shared_layers", None):
        kinds = config.layer_types
        if len(kinds) <= num_shared or not set(kinds) <= set(kinds[:-num_shared]):
            raise NotStated(f"num_kv_shared_layers = {num_shared}: no layer of a kind computes keys and values")


# --- rotary angles ---


def _rope_by_type(raw: Mapping[str, Any], family: Family, config: Any) -> dict[str, Any]:
    """The parameters of the rotary angles, complete; of a family with several, by kind of layer."""
    if not family.reads_old_rope:
        raw = {"rope_parameters": raw.get("rope_parameters")}
    given = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    if len(given) > 1 or not all(isinstance(item, Mapping) for item in given):
        raise NotStated("config.json has rotary angles in two forms")
    rope = dict(given[0]) if given else dict(family.rope)
    theta = raw.get("rope_theta", family.theta)
    if family.local_theta is None:
        return _rope(rope, theta, raw, family, config)
    if not raw.get("rope_parameters"):
        rope = {"full_attention": {"rope_type": "default", **rope}}
    bases = {"full_attention": theta, "sliding_attention": raw.get("rope_local_base_freq", family.local_theta)}
    if not rope.keys() <= bases.keys():
        raise NotStated(f"its rotary angles are of kinds {', '.join(sorted(rope))}")
    return {kind: _rope(dict(rope.get(kind) or {}), base, raw, family, config) for kind, base in bases.items()}


def _rope(rope: dict[str, Any], theta: float, raw: Mapping[str, Any], family: Family, config: Any) -> dict[str, Any]:
    """The parameters of one kind of rotary angles, complete."""
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    kind = family.rope_kinds.get(kind, kind)
    kind = "dynamic" if kind == "ntk_alpha" and not rope.get("alpha") else kind
    rope.setdefault("rope_theta", theta)
    _set_partial(rope, raw, family, config)
    if kind in _LENGTH_IS_ORIGINAL:
        original = getattr(config, "original_max_position_embeddings", None)
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        rope["original_max_position_embeddings"] = original or rope["original_max_position_embeddings"]
    if kind not in _ROPE_NEEDS or not _ROPE_NEEDS[kind] <= rope.keys():
        raise NotStated(f"its rotary angles are of kind {kind}, with {', '.join(sorted(rope))}")
    for key, value in rope.items():
        if not _ROPE_KINDS.get(key, _is_anything)(value):
            raise NotStated(f"its rotary angles have {key} = {value!r}")
    return {"rope_type": kind, **rope}


def _set_partial(rope: dict[str, Any], raw: Mapping[str, Any], family: Family, config: Any) -> None:
    num_dims = getattr(config, "rotary_dim", None)
    default = family.partial if num_dims is None else num_dims / config.head_dim
    found = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", default))
    if family.partial is None and found not in (None, 1, 1.0):
        raise NotStated(f"its rotary angles have partial_rotary_factor = {found!r}")
    if found is not None:
        rope["partial_rotary_factor"] = found


# --- kinds of values ---


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_fraction(value: Any) -> bool:
    return type(value) is float and 0 < value < 1


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_index_or_last(value: Any) -> bool:
    return type(value) is int and value >= -1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_anything(value: Any) -> bool:
    return True


def _each(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _or_none(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _are_tokens(value: Any) -> bool:
    return value is None or _is_index(value) or _each(_is_index)(value)


def _are_heads_of_layers(value: Any) -> bool:
    """Whether it maps layers' indices, as text, to counts of heads."""
    return isinstance(value, Mapping) and all(
        str(layer).isdecimal()
        and isinstance(heads, Mapping)
        and heads.keys() <= _HEADS
        and all(map(_is_count, heads.values()))
        for layer, heads in value.items()
    )


def _is_linear_attention(value: Any) -> bool:
    """Whether it is Kimi's description of its linear attention: sizes, and layers counted from 1."""
    if not isinstance(value, Mapping):
        return False
    sizes = [value.get(key, 1) for key in ("head_dim", "num_heads")]
    lists = [value.get(key, []) for key in ("kda_layers", "full_attn_layers")]
    return (
        all(map(_is_count, sizes))
        and all(map(_each(_is_count), lists))
        and _is_conv_width(value.get("short_conv_kernel_size", 4))
    )


def _is_count_or_auto(value: Any) -> bool:
    return value == "auto" or _is_count(value)


def _are_bounds(value: Any) -> bool:
    """Two numbers, of which one may be infinite: `{"__float__": "Infinity"}` as transformers writes it."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(one) in (int, float) or one == {"__float__": "Infinity"} for one in value)


def _is_conv_width(value: Any) -> bool:
    return type(value) is int and 2 <= value <= MAX_CONV_WIDTH


_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": REQUIRED,
    "original_max_position_embeddings": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""Entries of every family, and their usual defaults."""

_READ_APART: Final = frozenset({"dtype", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})

_HEADS: Final = frozenset({"head_dim", "num_key_value_heads"})

_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "clip_qkv": (None,),
    "is_llama_config": (None, True),
    "mla_use_nope": (None, True),
    "rope_interleaved": (None, False),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "use_bidirectional_attention": (None, False, "vision"),  # among the tokens of an image
    "use_mrope": (None, False),
}
"""Entries that no layout can say, and the values under which they change nothing."""

_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    name: kind
    for kind, names in (
        (_is_count, "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"),
        (_is_count, "max_position_embeddings no_rope_layer_interval decoder_sparse_step"),
        (_is_count, "mamba_n_heads mamba_n_groups mamba_d_state mamba_expand mamba_num_heads"),
        (_is_count, "mamba_head_dim n_groups ssm_state_size num_heads state_size"),
        (_is_count, "moe_shared_expert_intermediate_size shared_intermediate_size"),
        (_is_index, "num_local_experts"),
        (_or_none(_is_count), "moe_latent_size mamba_d_ssm"),
        (_is_count_or_auto, "mamba_d_head"),
        (_or_none(_are_bounds), "time_step_limit"),
        (_is_flag, "mamba_conv_bias mamba_proj_bias use_conv_bias mamba_rms_norm mamba_norm_before_gate"),
        (_is_flag, "projectors_bias"),
        (_is_positive, "time_step_min lm_head_multiplier key_multiplier attention_out_multiplier"),
        (_is_positive, "attention_in_multiplier ssm_in_multiplier ssm_out_multiplier"),
        (_or_none(_each(_is_positive)), "mlp_multipliers ssm_multipliers"),
        (_is_text, "mlp_hidden_act mamba_hidden_act"),
        (_or_none(_is_text), "position_embedding_type hybrid_override_pattern"),
        (_or_none(_is_count), "num_experts moe_intermediate_size"),
        (_or_none(_is_index), "num_experts_per_tok"),
        (_is_count, "shared_expert_intermediate_size moe_num_experts moe_k moe_topk moe_layer_interval"),
        (_is_count, "n_routed_experts block_multiple_of full_attention_interval"),
        (_is_count, "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"),
        (_or_none(_is_count), "num_key_value_heads head_dim original_max_position_embeddings rotary_dim"),
        (_is_count, "linear_head_dim linear_num_heads"),
        (_or_none(_is_linear_attention), "linear_attn_config"),
        (_is_count, "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"),
        (_or_none(_is_count), "q_lora_rank n_group topk_group"),
        (_or_none(_is_count), "block_ff_dim global_head_dim num_global_key_value_heads top_k_experts"),
        (_or_none(_is_index), "hidden_size_per_layer_input num_kv_shared_layers"),
        (_is_count, "vocab_size_per_layer_input type_vocab_size local_attention global_attn_every_n_layers"),
        (_or_none(_is_index), "pad_token_id"),
        (_or_none(_are_heads_of_layers), "per_layer_config"),
        (_or_none(_is_index), "sliding_window"),
        (_is_index, "max_window_layers sliding_window_pattern n_shared_experts moe_num_shared_experts"),
        (_is_index, "moe_layer_start_index first_k_dense_replace num_dense_layers"),
        (_is_index_or_last, "moe_layer_end_index"),
        (_is_flag, "tie_word_embeddings attention_bias attention_out_bias mlp_bias qkv_bias use_bias use_qkv_bias"),
        (_is_flag, "attention_k_eq_v enable_moe_block transposed_experts use_double_wide_mlp"),
        (_is_flag, "norm_bias conv_bias block_auto_adjust_ff_dim use_expert_bias"),
        (_or_none(_is_flag), "tie_embedding rope_interleave"),
        (_is_flag, "use_sliding_window use_qk_norm qk_layernorm use_parallel_residual norm_topk_prob"),
        (_is_fraction, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"),
        (_is_positive, "logit_scale embedding_multiplier logits_scaling residual_multiplier attention_multiplier"),
        (_is_positive, "query_pre_attn_scalar routed_scaling_factor moe_norm_min block_ffn_dim_multiplier"),
        (_or_none(_is_positive), "attn_logit_softcapping final_logit_softcapping"),
        (_is_text, "hidden_act hidden_activation topk_method"),
        (_are_tokens, "eos_token_id"),
        (_or_none(_each(_is_text)), "layer_types mlp_layer_types"),
        (_or_none(_each(_is_index)), "no_rope_layers mlp_only_layers full_attn_idxs attn_layer_indices"),
        (_is_conv_width, "conv_L_cache linear_conv_kernel_dim mamba_d_conv conv_kernel"),
    )
    for name in names.split()
}
"""Checks of values by entry."""

_ROPE_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    name: kind
    for kind, names in (
        (_is_positive, "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings"),
        (_is_positive, "partial_rotary_factor beta_fast beta_slow mscale mscale_all_dim"),
        (_or_none(_is_positive), "alpha llama_4_scaling_beta"),
        (_or_none(_is_positive), "attention_factor"),
        (_is_flag, "truncate"),
        (_each(_is_positive), "short_factor long_factor"),
    )
    for name in names.split()
}
