"""HF layers for a proof: single layers of a parallelized Hugging Face model, or the whole model.

It runs in the model's own dtype, or in float32 with one weight at a time converted.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.models.linear import Linear, VocabParallelEmbedding
from holdfast.worker.models.reference import CONVERTED_AT_A_TIME, GIVEN_BACK_FROM, product

_AT_A_TIME: Final = 2**24
"""Weights that are multiplied together as they are: libraries make a copy of them in an order of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a layer's attention was called with."""

    query: Tensor
    """[heads, T, head_dim], normed and rotated"""
    key: Tensor
    value: Tensor
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


class HfLayers:
    """A parallelized Hugging Face causal LM that is neither settled nor attached to a cache."""

    def __init__(self, module: Any, final_norm: str) -> None:
        """`final_norm` is the name of the norm after the last layer."""
        self._module = module
        self._base = module.base_model
        self._layers = list(self._base.layers)[: module.config.num_hidden_layers]
        self._final_norm = getattr(self._base, final_norm)
        self._arguments: dict[tuple[torch.dtype, int], list[dict[str, Any]]] = {}
        self._files = MappedFiles()

    def run_layer(
        self, index: int, x: Tensor, dtype: torch.dtype, positions: Tensor | None = None
    ) -> tuple[Tensor, AttentionCall]:
        """A layer on the residual stream [T, hidden] of one sequence, computed in `dtype`; and its attention call.
        `positions` [T] are 0, 1, ... unless given, and follow each other.
        """
        positions = torch.arange(len(x)) if positions is None else positions
        key = dtype, int(positions[0])
        if key not in self._arguments:
            self._arguments[key] = self.layer_arguments(positions, dtype)
        layer, calls = self._layers[index], list[AttentionCall]()
        with _attending(layer, calls), _computing_in(layer, dtype, self._files):
            y = layer(x[None].to(dtype), **self._arguments[key][index])
        return (y[0] if isinstance(y, tuple) else y)[0].float(), calls[0]

    def run_model(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The logits [T, vocab] of one sequence, computed in `dtype`."""
        positions = torch.arange(len(token_ids))[None]
        with _attending(self._module, []), _computing_in(self._module, dtype, self._files):
            output = self._module(input_ids=token_ids[None], position_ids=positions, use_cache=False, return_dict=True)
        logits: Tensor = output.logits[0]
        return logits.float()

    def layer_settings(self, index: int) -> object:
        """All plain values that the modules of a layer hold, but its number."""
        return tuple(
            (path, name, value)
            for path, part in self._layers[index].named_modules()
            for name, value in vars(part).items()
            if name != "layer_idx" and isinstance(value, bool | int | float | str | None)
        )

    def layer_arguments(self, positions: Tensor, dtype: torch.dtype) -> list[dict[str, Any]]:
        """What the model gives each layer beside the hidden states, such as its rotary angles, for these positions."""
        seen: list[dict[str, Any]] = []

        def note(hidden_states: Tensor, *others: Any, **arguments: Any) -> Tensor:
            assert all(other is None for other in others), "a layer's further inputs have names"
            seen.append(arguments)
            return hidden_states

        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(_instead(layer, note))
            stack.enter_context(_instead(self._final_norm, lambda hidden_states: hidden_states))
            nothing = torch.zeros(1, len(positions), self._module.config.hidden_size, dtype=dtype)
            self._base(inputs_embeds=nothing, position_ids=positions[None], use_cache=False)
        assert len(seen) == len(self._layers), "every layer is called once"
        return seen


def in_own_dtype(module: nn.Module) -> AbstractContextManager[None]:
    """Inside it, a module that is not settled computes as it is, with one large weight in memory at a time."""
    return _computing_in(module, None, MappedFiles())


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module computes something else."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _attending(module: nn.Module, calls: list[AttentionCall]) -> Iterator[None]:
    """The attention modules inside attend over one sequence, and their calls are noted."""
    modules: list[Any] = list(module.modules())
    for part in modules:
        part.paged_attention = partial(_attend, calls)
    try:
        yield
    finally:
        for part in modules:
            del part.paged_attention


def _attend(
    calls: list[AttentionCall],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]: scores in float32, weights rounded."""
    call = AttentionCall(
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    calls.append(call)
    groups = query.shape[1] // key.shape[1]
    scores = (query[0].float() @ key[0].float().repeat_interleave(groups, 0).mT) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    order = torch.arange(scores.shape[-1])
    distance = order[:, None] - order
    hidden = (distance < 0) | (distance >= (len(order) if sliding_window is None else sliding_window))
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float()[:, None, None].expand(-1, len(order), 1)), -1)
    weights = scores.softmax(-1)[..., : len(order)].to(value.dtype)
    return (weights @ value[0].repeat_interleave(groups, 0)).transpose(0, 1)[None]


@contextmanager
def _computing_in(module: nn.Module, dtype: torch.dtype | None, files: MappedFiles) -> Iterator[None]:
    """Inside it, the module computes in float32 if `dtype` says so, and as it is otherwise (None: in any case).

    No more than one large weight of a mapped file is resident at a time.
    """
    kept: list[tuple[nn.Module, str, Tensor]] = []
    exact = dtype == torch.float32
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, Linear):
                assert isinstance(part.weight, Tensor), "a proof comes before the model is settled"
                stack.enter_context(_instead(part, partial(_in_pieces, part, part.weight, exact, files)))
            elif not exact:
                continue
            elif isinstance(part, VocabParallelEmbedding):
                stack.enter_context(_instead(part, partial(_exact_embedding, part.forward)))
            else:
                kept += _convert(part)
        try:
            yield
        finally:
            for part, name, tensor in kept:
                setattr(part, name, tensor)


def _in_pieces(linear: Linear, weight: Tensor, exact: bool, files: MappedFiles, x: Tensor) -> Tensor:
    """The product of a linear, some outputs at a time."""
    rows = min(len(weight), max(1, (CONVERTED_AT_A_TIME if exact else _AT_A_TIME) // linear.in_features))
    whole = not exact and rows == len(weight)
    y = F.linear(x, weight, linear.bias) if whole else product(x, weight, linear.bias, rows)
    if weight.nbytes >= GIVEN_BACK_FROM:
        files.give_back(weight)
    return y


def _exact_embedding(forward: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
    return forward(token_ids).float()


def _convert(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Gives the module float32 copies of its own parameters and buffers; what it had, and where."""
    own = [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
    kept = [
        (module, name, tensor) for name, tensor in own if tensor.is_floating_point() and tensor.dtype != torch.float32
    ]
    for _, name, tensor in kept:
        copy = tensor.detach().float()
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(copy, requires_grad=False) if is_parameter else copy)
    return kept
