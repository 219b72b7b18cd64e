"""Dry run of a model: one forward pass without a cache, which finds its attention layers and what each of them caches.

Each token attends to itself alone, so that values flow as they later will.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.models.checks import OTHER_ENGINE, check_attention_calls, first_line
from holdfast.worker.models.linear import Linear, PackedWeight
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.reference import GIVEN_BACK_FROM
from holdfast.worker.models.reference_functions import product

_AT_A_TIME: Final = 2**24
"""Weights that are multiplied together: libraries make a copy of them in their own order."""

Call = tuple[Any, KVSpec]
"""The calling attention module, and its stored values."""


def find_attention(model: Any, forward: Callable[[], object], target: Target) -> list[Call]:
    """The attention modules of a Hugging Face model in calling order, one for each layer.

    `forward` runs the model on a few tokens; all ranks of the group do so together. Raises `UnsupportedModelError`
    where the paged cache would not hold the model's whole state, or where ranks come to different results, and
    `NotFiniteError` where these are not finite.
    """
    calls: list[Call] = []
    states: list[Tensor] = []
    with torch.inference_mode():
        try:
            with _recording(model, calls, target.dtype), _last_states(model, states), _as_settled(model):
                forward()
        except UnsupportedModelError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            reason = f"its modeling code does not run on Holdfast's linears and attention ({first_line(error)})"
            raise UnsupportedModelError(model.config.model_type, reason, OTHER_ENGINE) from error
        _check_states(model, states, target)
    check_attention_calls(model.config, [module for module, _ in calls])
    return calls


@contextmanager
def _recording(model: nn.Module, calls: list[Call], dtype: torch.dtype) -> Iterator[None]:
    """Every module can call as an attention module, and the calls are noted."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        module.paged_attention = partial(_record, calls, dtype, module)
    try:
        yield
    finally:
        for module in modules:
            del module.paged_attention


def _record(
    calls: list[Call],
    dtype: torch.dtype,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Notes the call and returns what attention gives where each token sees itself alone."""
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(module.config.model_type, "its attention is not causal", OTHER_ENGINE)
    if {query.dtype, key.dtype, value.dtype} != {dtype}:
        reason = f"its attention works in {key.dtype} where the model is to compute in {dtype}"
        raise UnsupportedModelError(module.config.model_type, reason, "Choose another dtype")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    spec = KVSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        sliding_window=sliding_window,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )
    calls.append((module, spec))
    return value.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(1, 2)


@contextmanager
def _as_settled(model: nn.Module) -> Iterator[None]:
    """Inside it, modeling code sees the linears' weights as they will be after loading: without values."""
    linears = [part for part in model.modules() if isinstance(part, Linear)]
    weights = [linear.weight for linear in linears]
    for linear, weight in zip(linears, weights, strict=True):
        assert isinstance(weight, Tensor), "a dry run comes before the model is settled"
        linear.weight = PackedWeight.of(weight)
    try:
        yield
    finally:
        for linear, weight in zip(linears, weights, strict=True):
            linear.weight = weight


@contextmanager
def in_pieces(module: nn.Module) -> Iterator[None]:
    """Inside it, the linears of a module that is not settled are computed some outputs at a time, with one large weight
    in memory at a time.
    """
    files = MappedFiles()
    linears = [part for part in module.modules() if isinstance(part, Linear)]
    for linear in linears:
        assert isinstance(linear.weight, Tensor), "a dry run comes before the model is settled"
        linear.forward = partial(_product_in_pieces, linear, linear.weight, files)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _product_in_pieces(linear: Linear, weight: Tensor, files: MappedFiles, x: Tensor) -> Tensor:
    rows = min(len(weight), max(1, _AT_A_TIME // linear.in_features))
    is_small = rows == len(weight)
    y = F.linear(x, weight, linear.bias) if is_small else product(x, weight, linear.bias, rows)
    if weight.nbytes >= GIVEN_BACK_FROM:
        files.give_back(weight)
    return y


@contextmanager
def _last_states(model: Any, states: list[Tensor]) -> Iterator[None]:
    """Notes the inputs of the head."""
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        yield
    finally:
        hook.remove()


def _check_states(model: Any, states: list[Tensor], target: Target) -> None:
    """Refuses a model whose last hidden states are not finite, or differ between ranks: somewhere a sum over ranks is
    missing.
    """
    for state in states:
        mine = state.contiguous()
        everyones = target.group.all_gather(mine, dim=0)
        if not everyones.isfinite().all():
            raise NotFiniteError(f"its hidden states are NaN or infinite in {target.dtype}")
        if not torch.equal(everyones, torch.cat([mine] * target.group.size)):
            reason = f"its {target.group.size} ranks do not agree: its tensor-parallel plan has a gap"
            raise UnsupportedModelError(model.config.model_type, reason, "Serve it with tensor_parallel_size 1")
