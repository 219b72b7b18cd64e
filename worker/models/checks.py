"""Model checks: a model that would silently compute wrong results is refused, with the reason and a way out."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.layout_arithmetic import shares_evenly, uneven_shares
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family_rules import kv_head_counts
from holdfast.worker.models.formats.quantization_scheme import read_scheme

CAUSAL_SUFFIXES: Final = ("ForCausalLM", "LMHeadModel")
LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose whole state is the keys and values that the attention function is given."""

MAX_POSITIONS: Final = 2**31 - 1
"""Positions are of 32 bits in the native library and on devices."""

OTHER_ENGINE: Final = "Serve a model of another family, or this one with Hugging Face generate"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for use in another message; with the next line, if it ends with a colon."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def check_kv_cache_dtype(config: WorkerConfig, device: str, hf_config: Any = None) -> None:
    """Refuses a type of keys and values that nothing reads: int8 on a GPU; fp8 on a CPU, on the HF backend, and in a
    model of a type that has no native backend, by its Hugging Face config if that is known; and a dtype that is not
    the model's.

    Models that the executor does not support are refused when the config is read. `device` is a kind, or `auto` where
    it is not known yet. Raises `ConfigurationError`.
    """
    wanted = config.cache.kv_cache_dtype
    if wanted == "int8" and device == "cuda":
        raise kv_cache_dtype_refused(config, "the model runs on a GPU, whose kernels read fp8", "choose fp8")
    if wanted == "fp8" and device == "cpu":
        raise kv_cache_dtype_refused(
            config, "the model runs on a CPU, and GPUs alone have kernels for it", "choose int8"
        )
    if wanted == "fp8" and config.model.executor == "hf":
        reason = "model.executor = 'hf', which has no kernels for it"
        raise kv_cache_dtype_refused(config, reason, "leave --executor at auto")
    if hf_config is not None:
        check_latents(config, hf_config.model_type)
    if wanted == "fp8" and hf_config is not None and not _is_native_on_gpus(hf_config.model_type):
        reason = f"model type {hf_config.model_type!r} has no native backend (docs/models.md)"
        raise kv_cache_dtype_refused(config, reason)
    if config.model.dtype != "auto":
        check_own_dtype(config, config.model.dtype)
    elif hf_config is not None:
        found = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or "float32"
        check_own_dtype(config, str(found).removeprefix("torch."))


def check_latents(config: WorkerConfig, model_type: str) -> None:
    """Refuses int8 for what native latent attention keeps. Raises `ConfigurationError`."""
    family = FAMILIES.get(model_type)
    if config.cache.kv_cache_dtype == "int8" and config.model.executor != "hf" and family is not None and family.latent:
        reason = (
            f"{model_type} caches latents and rotated keys, of different magnitudes, in a row with one scale in int8"
        )
        raise kv_cache_dtype_refused(config, reason)


def _is_native_on_gpus(model_type: str) -> bool:
    return model_type in FAMILIES and not FAMILIES[model_type].on_cpus_alone


def check_own_dtype(config: WorkerConfig, dtype: str) -> None:
    """Refuses keys and values in a float dtype that is not the model's. Raises `ConfigurationError`."""
    wanted = config.cache.kv_cache_dtype
    if wanted not in ("auto", "int8", "fp8", dtype):
        reason = f"the model runs in {dtype}, and keys and values are kept so, or in int8 (CPUs) or fp8 (GPUs)"
        raise kv_cache_dtype_refused(config, reason, f"set --dtype {wanted}")


def kv_cache_dtype_refused(config: WorkerConfig, reason: str, way_out: str = "") -> ConfigurationError:
    """The error of `cache.kv_cache_dtype`."""
    ways = f", or {way_out}" if way_out else ""
    wanted = config.cache.kv_cache_dtype
    return ConfigurationError(f"cache.kv_cache_dtype = {wanted!r}: {reason}; leave --kv-cache-dtype at auto{ways}")


_INDEXER: Final = "it has sparse attention: the indexer that chooses 2,048 keys for each query is not implemented"
_NOT_THERE: Final[Mapping[str, str]] = {
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "it has sparse attention: its indexer, compressed keys and four streams are not implemented",
    "glm5_next": "it has sparse attention: its indexer, Kimi Delta Attention and four streams are not implemented",
    "glm_moe_dsa": _INDEXER,
}
"""Types of models that are known and not served, and the reason."""


def check_known(model_type: str) -> None:
    """Refuses models by name of which a part is not there, such as sparse attention. Raises `UnsupportedModelError`."""
    if model_type in _NOT_THERE:
        raise UnsupportedModelError(model_type, _NOT_THERE[model_type], OTHER_ENGINE)


def check_config(config: Any) -> None:
    """Refuses models by the config alone: no causal LM, layers other than attention, alibi, weights in an unsupported
    quantization.

    `config` is a Hugging Face config. Raises `UnsupportedModelError`.
    """
    _check_architecture(config)
    _check_layers(config)
    _check_positions(config)
    quantization = getattr(config, "quantization_config", None)
    read_scheme({"model_type": config.model_type, "quantization_config": quantization})


def _check_architecture(config: Any) -> None:
    names = tuple(config.architectures or ())
    if getattr(config, "text_config", None) is not None and not hasattr(config, "vocab_size"):
        reason = "its config describes several models, of which one is for text"
        raise UnsupportedModelError(config.model_type, reason, "Serve the text model alone, saved as ...ForCausalLM")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(config.model_type, "it is an encoder-decoder model", OTHER_ENGINE)
    if names and not str(names[0]).endswith(CAUSAL_SUFFIXES):
        reason = f"its architecture {names[0]} is not a causal language model"
        raise UnsupportedModelError(config.model_type, reason, "Serve the text model alone, saved as ...ForCausalLM")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(config.model_type, "its attention is not causal", OTHER_ENGINE)


def _check_layers(config: Any) -> None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others and not (config.model_type in FAMILIES and FAMILIES[config.model_type].keeps_state):
        reason = f"it has {', '.join(others)} layers, whose state the paged cache does not hold"
        raise UnsupportedModelError(config.model_type, reason, OTHER_ENGINE)
    family = FAMILIES.get(config.model_type)
    if getattr(config, "num_kv_shared_layers", 0) and (family is None or family.shared_kv is None):
        reason = f"{config.num_kv_shared_layers} layers share the keys and values of others"
        raise UnsupportedModelError(config.model_type, reason, OTHER_ENGINE)


def _check_positions(config: Any) -> None:
    _positions(config)
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        raise UnsupportedModelError(config.model_type, "it uses alibi position biases", OTHER_ENGINE)
    if getattr(config, "position_bias", False):
        raise UnsupportedModelError(config.model_type, "it adds a position bias to the attention scores", OTHER_ENGINE)


def choose_max_model_len(config: Any, requested: int | None) -> int:
    """Maximum number of tokens of prompt plus output: the setting, or else the model's maximum.

    Raises `ConfigurationError` above the model's own maximum, and `UnsupportedModelError` where rotary angles would
    depend on the longest sequence of a batch (`dynamic` and `longrope` beyond their original length).
    """
    limit = _length_of_recipe(config)
    original = _length_with_fixed_angles(config)
    if requested is None:
        limits = [length for length in (limit, original) if length is not None]
        if not limits:
            raise ConfigurationError(
                f"model.max_model_len is not set, and model type {config.model_type!r} states no limit; set one"
            )
        return min(limits)
    if original is not None and requested > original:
        reason = f"beyond {original} tokens its rotary angles depend on the longest sequence of the batch"
        raise UnsupportedModelError(config.model_type, reason, f"Set max_model_len to at most {original}")
    if limit is not None and requested > limit:
        raise ConfigurationError(
            f"model.max_model_len = {requested}: model type {config.model_type!r} has {limit} positions; "
            f"set it to at most {limit}"
        )
    return requested


def _length_of_recipe(config: Any) -> int | None:
    """The positions that a model has: those of its config, or more where a model card has yarn added to that."""
    limit = _positions(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") != "yarn":
        return limit
    original, factor = rope.get("original_max_position_embeddings") or limit, rope.get("factor", 1.0)
    are_numbers = isinstance(original, int) and isinstance(factor, (int, float))
    if not are_numbers or not 0 < factor * original <= MAX_POSITIONS:  # nor NaN
        raise _impossible(config, f"rotary angles of kind yarn with factor = {factor}, from {original} positions on")
    return max(limit, int(original * factor))


def _positions(config: Any) -> int | None:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is not None and not (isinstance(limit, int) and 1 <= limit <= MAX_POSITIONS):
        raise _impossible(config, f"max_position_embeddings = {limit}")
    return limit


def _impossible(config: Any, entry: str) -> UnsupportedModelError:
    reason = f"its config.json has {entry}"
    return UnsupportedModelError(config.model_type, reason, "Fetch the file again, or replace the entry")


def _length_with_fixed_angles(config: Any) -> int | None:
    """The shortest length up to which rotary angles are a function of the position alone; None: always."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = parameters.values() if all(isinstance(v, Mapping) for v in parameters.values()) else [parameters]
    lengths = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for rope in per_layer_type
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(lengths, default=None)


def check_heads(config: Any, tensor_parallel_size: int, *, may_be_uneven: bool = False) -> tuple[int, ...] | None:
    """Refuses head counts that ranks cannot share: query heads divide, KV heads divide or are repeated evenly; or,
    where shares `may_be_uneven`, each rank has whole slices (`uneven_shares`), which are returned.
    """
    num_heads = getattr(config, "num_attention_heads", None)
    if num_heads is None:  # no layer attends
        return None
    kv_heads = kv_head_counts(config)
    uneven = None
    for count in kv_heads:
        uneven = (
            uneven_shares(num_heads, count, tensor_parallel_size) if may_be_uneven and kv_heads == [count] else None
        )
        if uneven is None and not shares_evenly(num_heads, count, tensor_parallel_size):
            reason = f"{num_heads} query and {count} KV heads cannot be shared by {tensor_parallel_size} ranks"
            raise UnsupportedModelError(config.model_type, reason, "Choose another tensor_parallel_size")
    return uneven


def check_num_layers(config: Any, num_tensors: int) -> None:
    """Refuses more layers than the checkpoint has tensors, if it has any, before a module is made for each."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers > num_tensors > 0:
        raise _impossible(config, f"num_hidden_layers = {num_layers}, and the checkpoint {num_tensors} tensors")


def check_loaded(
    model_type: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]] = (),
) -> None:
    """Refuses a checkpoint that does not fill the model exactly. The collections are names of parameters; mismatched
    ones come with their shapes, in the checkpoint and in the model.
    """
    if mismatched:
        name, there, wanted = min(mismatched, key=lambda item: item[0])
        shapes = f"{name} has the shape {list(there)}, and by config.json {list(wanted)}"
        reason = f"{len(mismatched)} weights of the checkpoint are of another shape ({shapes})"
        raise UnsupportedModelError(model_type, reason, "Check that config.json and the safetensors belong together")
    for problem, names in (("is missing", missing), ("has unexpected", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            reason = f"the checkpoint {problem} {len(names)} weights ({shown})"
            raise UnsupportedModelError(
                model_type, reason, "Check that config.json and the safetensors belong together"
            )


def check_attention_calls(config: Any, called: Sequence[object]) -> None:
    """Refuses a model that did not call the paged attention once a layer. `called` has the caller of each call."""
    num_layers, num_modules = config.num_hidden_layers, len(set(map(id, called)))
    if len(called) == num_layers == num_modules:
        return
    if not called:
        reason = (
            "its modeling code implements attention or a state itself: no layer calls the attention function that "
            "reads the paged cache"
        )
    elif len(called) > num_modules:
        reason = (
            f"its layers attend several times a token ({len(called)} attention calls in {num_modules} modules), and "
            "the paged cache holds one set of keys and values a layer"
        )
    else:
        reason = f"{num_modules} of its {num_layers} layers attend, and the others keep a state that the cache does not"
    raise UnsupportedModelError(config.model_type, reason, OTHER_ENGINE)
