"""Proof at load: whether a decoder layout, and an executor of it, compute what the Hugging Face model computes.

First the layout: each kind of layer, run by the reference in float32, against its Hugging Face layer in float32. Then
the executor: each kind of layer and the whole model, whose error may be about twice that of Hugging Face's own
arithmetic in the model's dtype. What may not live here: running either (`reference.py`, `skeleton.py`).
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.decoder.families import FAMILIES
from holdfast.worker.decoder.layout import Attention, DecoderLayout, Rotary
from holdfast.worker.decoder.reference import Reference
from holdfast.worker.decoder.skeleton import AttentionCall, Skeleton
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup

NUM_TOKENS: Final = 16

_FACTOR: Final = 2.0
"""How many times Hugging Face's own error an executor's may be."""

_FLOORS: Final = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What it may be on top, relative to what is computed."""

_EXACT: Final = 2e-5
"""How far apart two float32 computations of the same may be."""

_QUANTILE: Final = 0.75
"""The share of rows that must agree. In a mixture of experts, some rows may choose others where two are close."""

_SMALLEST, _LARGEST = -2.0, 0.5
"""Powers of ten between which the rows of random states are scaled: small ones show an epsilon, large ones do not."""


class Executor(Protocol):
    """Runs one rank's share of a layout. All ranks make the same calls. Used with at most `NUM_TOKENS` tokens."""

    def run_layer(self, index: int, x: Tensor) -> Tensor:
        """The residual stream [T, hidden], float32, of one sequence from its first position on, after a layer."""
        ...

    def run_model(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] of one sequence from its first position on -> logits [T, vocab], float32, on every rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What came of it; the same on every rank."""

    reason: str | None
    """Why the executor is not to be used, for the log; None: it is."""
    layer_error: float
    """The worst error of a layer, as a multiple of what is allowed; likewise of the whole model."""
    model_error: float


def prove(module: Any, layout: DecoderLayout, executor: Executor, group: TensorParallelGroup, *, max_len: int) -> Proof:
    """Compares `executor`, which runs `layout`, with the parallelized and not yet settled Hugging Face model `module`.

    All ranks of the group do so together. `max_len`: the most positions that the model is served with.
    """
    with torch.inference_mode():
        return _Comparison(module, layout, executor, group).run(max_len)


class _Comparison:
    """One proof. Each step ends in numbers, or a reason, that all ranks agree on before the next."""

    def __init__(self, module: Any, layout: DecoderLayout, executor: Executor, group: TensorParallelGroup) -> None:
        self._skeleton = Skeleton(module, FAMILIES[module.config.model_type].final_norm)
        self._layout = layout
        self._executor = executor
        self._reference = Reference(layout, group)
        self._group = group
        self._generator = torch.Generator().manual_seed(0)
        self._worst = 0.0

    def run(self, max_len: int) -> Proof:
        num_tokens = min(NUM_TOKENS, max_len)
        reason = self._agreed(self._rotary_difference(max_len))
        for index in self._first_of_each_kind() if reason is None else ():
            reason = reason or self._layer_difference(index, self._random_states(num_tokens))
        if reason is not None:
            return Proof(reason=reason, layer_error=self._worst, model_error=0.0)
        token_ids = torch.randint(self._layout.vocab_size, (num_tokens,), generator=self._generator)
        error = self._model_error(token_ids)
        reason = None if error <= 1.0 else f"its logits are wrong by {error:.3g} times what is allowed"
        return Proof(reason=reason, layer_error=self._worst, model_error=error)

    def _first_of_each_kind(self) -> list[int]:
        """One layer of each set that differ in the values of their weights alone, by their layouts and as modules."""
        first: dict[object, int] = {}
        for index, layer in enumerate(self._layout.layers):
            first.setdefault((_kind(layer), self._skeleton.layer_settings(index)), index)
        return list(first.values())

    def _random_states(self, num_tokens: int) -> Tensor:
        """Rows of the residual stream, of many magnitudes, that the model's dtype holds exactly."""
        scales = torch.logspace(_SMALLEST, _LARGEST, num_tokens)[torch.randperm(num_tokens, generator=self._generator)]
        states = torch.randn(num_tokens, self._layout.hidden_size, generator=self._generator) * scales[:, None]
        return states.to(self._layout.dtype).float()

    def _rotary_difference(self, max_len: int) -> str | None:
        """How the angles of a layer differ, at positions up to the last."""
        positions = torch.tensor(sorted({0, 1, max_len // 3, max_len - 1}))
        arguments = self._skeleton.layer_arguments(positions, torch.float32)
        for index, (layer, given) in enumerate(zip(self._layout.layers, arguments, strict=True)):
            if layer.attention.rotary is not None:
                rotary = self._layout.rotaries[layer.attention.rotary]
                if not _same_angles(rotary, positions, given.get("position_embeddings")):
                    return f"the rotary angles of layer {index} differ"
        return None

    def _layer_difference(self, index: int, x: Tensor) -> str | None:
        """How a layer of the layout, or of the executor, differs from the Hugging Face layer on these states."""
        exact, call = self._skeleton.run_layer(index, x, torch.float32)
        attention = self._layout.layers[index].attention
        if (reason := self._agreed(_call_difference(attention, call))) is not None:
            return f"the attention of layer {index} {reason}"
        described = self._reference.run_layer(index, x)
        error = self._excess(described, exact, exact, x, _EXACT)
        if error > 1.0:
            return f"layer {index} is not what its layout says: wrong by {error:.3g} times what is allowed"
        own = exact
        if self._layout.dtype != torch.float32:
            own, _ = self._skeleton.run_layer(index, x, self._layout.dtype)
        error = self._excess(self._executor.run_layer(index, x), own, exact, x, _FLOORS[self._layout.dtype])
        self._worst = max(self._worst, error)
        return None if error <= 1.0 else f"layer {index} is wrong by {error:.3g} times what is allowed"

    def _model_error(self, token_ids: Tensor) -> float:
        """The error of the executor's logits, as a multiple of what is allowed."""
        exact = self._skeleton.run_model(token_ids, torch.float32)
        own = exact
        if self._layout.dtype != torch.float32:
            own = self._skeleton.run_model(token_ids, self._layout.dtype)
        floor = _FLOORS[self._layout.dtype]
        return self._excess(self._executor.run_model(token_ids), own, exact, torch.zeros_like(exact), floor)

    def _excess(self, ours: Tensor, own: Tensor, exact: Tensor, before: Tensor, floor: float) -> float:
        """The error of `ours` as a multiple of what is allowed, where `own` is what Hugging Face's arithmetic gives.

        Errors count in relation to what is added to `before`. The worst of all ranks.
        """
        change = (exact - before).norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        allowed = _FACTOR * (own - exact).norm(dim=-1) / change + floor
        excess = (((ours.float() - exact).norm(dim=-1) / change) / allowed).nan_to_num(torch.inf, torch.inf)
        worst = torch.quantile(excess, _QUANTILE, interpolation="higher")
        return float(self._group.all_gather(worst[None], dim=0).max())

    def _agreed(self, reason: str | None) -> str | None:
        """The reason of this rank, or that another has one."""
        others = self._group.all_gather(torch.tensor([reason is not None]), dim=0)
        return reason or ("differs on another rank" if bool(others.any()) else None)


def _kind(part: object) -> object:
    """All of a part of a layout but the values of its tensors."""
    if isinstance(part, Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, tuple):
        return tuple(_kind(item) for item in part)
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    return part


def _call_difference(attention: Attention, call: AttentionCall) -> str | None:
    """Another number, window or constant than those that Hugging Face's attention is called with."""
    shapes = (len(call.query), len(call.key), call.query.shape[-1], call.value.shape[-1])
    if shapes != (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.head_dim):
        return f"has heads of other numbers or sizes: {shapes}"
    for name in ("sliding_window", "softcap"):
        if (expected := getattr(call, name)) != (found := getattr(attention, name)):
            return f"has {name} {expected}, not {found}"
    if not math.isclose(call.scaling, attention.scaling, rel_tol=1e-6):
        return f"has scaling {call.scaling}, not {attention.scaling}"
    if (call.sinks is None) != (attention.sinks is None):
        return "has sinks" if attention.sinks is None else "has no sinks"
    return None


def _same_angles(rotary: Rotary, positions: Tensor, given: tuple[Tensor, Tensor] | None) -> bool:
    """Whether Hugging Face's cosines and sines are those of the layout, in whichever form its code wants them."""
    if given is None:
        return False
    angles = positions.float()[:, None] * rotary.inverse_frequencies
    forms = {
        len(rotary.inverse_frequencies): (angles,),
        rotary.num_dims: (torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)),
    }
    cos, sin = (part[0].float() for part in given)
    return any(
        torch.allclose(cos, form.cos() * rotary.scaling, rtol=0, atol=_EXACT)
        and torch.allclose(sin, form.sin() * rotary.scaling, rtol=0, atol=_EXACT)
        for form in forms.get(cos.shape[-1], ())
    )
