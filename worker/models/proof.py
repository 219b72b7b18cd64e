"""Proof at load: whether a decoder layout, and an executor of it, compute what the Hugging Face model computes.

First Hugging Face's modules are asked, and the layout is compared: each kind of layer, run by the reference in float32,
with its Hugging Face layer in float32. Then the executor is checked by the answers alone: each kind of layer and the
whole model, whose error may be about twice that of Hugging Face's own arithmetic in the model's dtype. The answers can
be kept, and the weights that gave them may be gone by then.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.executors.layout import Attention, DecoderLayout, Rotary, attention_of
from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.models.hf_layers import AttentionCall, HfLayers
from holdfast.worker.models.recognized_families import FAMILIES
from holdfast.worker.models.reference import Reference

NUM_TOKENS: Final = 16

_FACTOR: Final = 2.0
"""How many times Hugging Face's own error an executor's may be."""

_FLOORS: Final = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What it may be on top, relative to what is computed."""

_EXACT: Final = 2e-5
"""How far apart two float32 computations of the same may be."""

_QUANTILE: Final = 0.75
"""The share of rows that must agree. In a mixture of experts, some rows may choose others where two are close."""

_MOST_REFERENCE_BYTES: Final = 1 << 30
"""Of a rank's weights, that the reference executor runs as a whole: a second of CPU for about 400 MB."""

_SMALLEST, _LARGEST = -2.0, 0.5
"""Powers of ten between which the rows of random states are scaled: small ones show an epsilon, large ones do not."""


class Executor(Protocol):
    """Runs one rank's share of a layout. All ranks make the same calls. Used with at most `NUM_TOKENS` tokens."""

    def run_layer(self, index: int, x: Tensor) -> Tensor:
        """The residual stream [T, hidden], float32, of one sequence from its first position on, after a layer."""
        ...

    def run_model(self, token_ids: Tensor) -> Tensor | None:
        """Token ids [T] of one sequence from its first position on -> logits [T, vocab], float32, at the leader; others
        may have none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows that Hugging Face's modules have computed, and how far from them an executor may be."""

    exact: Tensor
    """[T, n], computed in float32."""
    change: Tensor
    """[T]: the length of what was added to the input. Errors count in relation to it."""
    allowed: Tensor
    """[T]"""

    def is_finite(self) -> bool:
        return bool(self.exact.isfinite().all() and self.allowed.isfinite().all())

    def excess(self, ours: Tensor) -> Tensor:
        """The error of `ours`, as a multiple of what is allowed; of the worst row but for `_QUANTILE`."""
        error = (ours.float() - self.exact).norm(dim=-1) / self.change
        excess = (error / self.allowed).nan_to_num(torch.inf, torch.inf)
        return torch.quantile(excess, _QUANTILE, interpolation="higher")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnswer:
    """What a layer makes of random states."""

    index: int
    states: Tensor
    """The residual stream [T, hidden] before it."""
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What Hugging Face's modules have computed: all that a proof of an executor needs of them."""

    layers: tuple[LayerAnswer, ...]
    """One of each kind."""
    token_ids: Tensor
    logits: Answer | None
    """None of a large model that the reference executor was asked about: its logits need only be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognized:
    """A recognized model and the results of its Hugging Face modules: all that its native backend is made of."""

    layout: DecoderLayout
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What came of it; the same on every rank."""

    reason: str | None
    """Why the executor is not to be used, for the log; None: it is."""
    layer_error: float
    """The worst error of a layer, as a multiple of what is allowed; likewise of the whole model."""
    model_error: float


def ask(module: Any, layout: DecoderLayout, group: TensorParallelGroup, *, max_len: int) -> Answers | str:
    """What the parallelized and not yet settled Hugging Face model `module` computes; or how `layout` differs from it.

    All ranks of the group do so together. `max_len`: the most positions that the model is served with.
    """
    with torch.inference_mode():
        return _Questions(module, layout, group).ask(max_len)


def ask_reference(layout: DecoderLayout, group: TensorParallelGroup, *, max_len: int) -> Answers | str:
    """As `ask`, of the reference executor: for a layout that was read without Hugging Face's modules, whose family the
    tests prove; or what of it is not finite. A large model is not run as a whole. All ranks of the group do so
    together.
    """
    generator = torch.Generator().manual_seed(0)
    files = MappedFiles()
    exact, own = Reference(layout, group, files=files), Reference(layout, group, rounds=True, files=files)
    first = {_kind(layer): index for index, layer in reversed(list(enumerate(layout.layers)))}
    num_tokens, floor = min(NUM_TOKENS, max_len), _FLOORS[layout.dtype]
    layers: list[LayerAnswer] = []
    with torch.inference_mode():
        for index in sorted(first.values()):
            x = _random_states(layout, num_tokens, generator)
            answer = _answer(own.run_layer(index, x), exact.run_layer(index, x), x, floor)
            layers.append(LayerAnswer(index=index, states=x, answer=answer))
        token_ids = torch.randint(layout.vocab_size, (num_tokens,), generator=generator)
        logits = None
        if int(group.all_gather(torch.tensor([num_bytes(layout)]), dim=0).max()) <= _MOST_REFERENCE_BYTES:
            logits = _answer(own.run_model(token_ids), exact.run_model(token_ids), torch.zeros(()), floor)
    answers = [asked.answer for asked in layers] + ([] if logits is None else [logits])
    is_finite = all(answer.is_finite() for answer in answers)
    if not group.all_gather(torch.tensor([is_finite]), dim=0).all():
        return f"its states are NaN or infinite in {layout.dtype}"
    return Answers(layers=tuple(layers), token_ids=token_ids, logits=logits)


def check(executor: Executor, answers: Answers, group: TensorParallelGroup) -> Proof:
    """Compares an executor with the answers of Hugging Face's modules. All ranks of the group do so together."""
    worst = 0.0
    with torch.inference_mode():
        for asked in answers.layers:
            error = _worst_of_ranks(asked.answer.excess(executor.run_layer(asked.index, asked.states)), group)
            worst = max(worst, error)
            if error > 1.0:
                reason = f"layer {asked.index} is wrong by {error:.3g} times what is allowed"
                return Proof(reason=reason, layer_error=worst, model_error=0.0)
        logits = executor.run_model(answers.token_ids)
        excess = torch.zeros(()) if logits is None else _excess_of_logits(answers.logits, logits)
        error = _worst_of_ranks(excess, group)
    wrong = None if error <= 1.0 else f"its logits are wrong by {error:.3g} times what is allowed"
    return Proof(reason=wrong, layer_error=worst, model_error=error)


def _excess_of_logits(expected: Answer | None, logits: Tensor) -> Tensor:
    if expected is not None:
        return expected.excess(logits)
    return torch.tensor(0.0 if logits.isfinite().all() else torch.inf)


def prove(module: Any, layout: DecoderLayout, executor: Executor, group: TensorParallelGroup, *, max_len: int) -> Proof:
    """`ask` and `check`, for an executor that leaves the module's weights as they are."""
    answers = ask(module, layout, group, max_len=max_len)
    if isinstance(answers, str):
        return Proof(reason=answers, layer_error=0.0, model_error=0.0)
    return check(executor, answers, group)


class _Questions:
    """One series of questions. Each step ends in numbers, or a reason, that all ranks agree on before the next."""

    def __init__(self, module: Any, layout: DecoderLayout, group: TensorParallelGroup) -> None:
        self._hf_backend = HfLayers(module, FAMILIES[module.config.model_type].final_norm)
        self._layout = layout
        self._reference = Reference(layout, group)
        self._group = group
        self._generator = torch.Generator().manual_seed(0)

    def ask(self, max_len: int) -> Answers | str:
        num_tokens = min(NUM_TOKENS, max_len)
        if (difference := self._agreed(self._rotary_difference(max_len))) is not None:
            return difference
        layers: list[LayerAnswer] = []
        for index in self._first_of_each_kind():
            asked = self._ask_layer(index, _random_states(self._layout, num_tokens, self._generator), max_len)
            if isinstance(asked, str):
                return asked
            layers.append(asked)
        token_ids = torch.randint(self._layout.vocab_size, (num_tokens,), generator=self._generator)
        return Answers(layers=tuple(layers), token_ids=token_ids, logits=self._ask_model(token_ids))

    def _first_of_each_kind(self) -> list[int]:
        """One layer of each set that differ in the values of their weights alone, by their layouts and as modules."""
        first: dict[object, int] = {}
        for index, layer in enumerate(self._layout.layers):
            first.setdefault((_kind(layer), self._hf_backend.layer_settings(index)), index)
        return list(first.values())

    def _rotary_difference(self, max_len: int) -> str | None:
        """How the angles of a layer differ, at positions up to the last."""
        positions = torch.tensor(sorted({0, 1, max_len // 3, max_len - 1}))
        arguments = self._hf_backend.layer_arguments(positions, torch.float32)
        for index, (layer, given) in enumerate(zip(self._layout.layers, arguments, strict=True)):
            index_of_rotary = None if layer.attention is None else layer.attention.rotary
            if index_of_rotary is not None:
                rotary = self._layout.rotaries[index_of_rotary]
                if not _same_angles(rotary, positions, given.get("position_embeddings")):
                    return f"the rotary angles of layer {index} differ"
        return None

    def _ask_layer(self, index: int, x: Tensor, max_len: int) -> LayerAnswer | str:
        """What the Hugging Face layer makes of these states; or how that of the layout differs."""
        exact, call = self._hf_backend.run_layer(index, x, torch.float32)
        attention = attention_of(self._layout.layers[index])
        if (reason := self._agreed(_call_difference(attention, call))) is not None:
            return f"the attention of layer {index} {reason}"
        described = _answer(exact, exact, x, _EXACT).excess(self._reference.run_layer(index, x))
        if (error := _worst_of_ranks(described, self._group)) > 1.0:
            return f"layer {index} is not what its layout says: wrong by {error:.3g} times what is allowed"
        if attention.query_scale is not None and (error := self._error_at_last_positions(index, x, max_len)) > 1.0:
            return f"layer {index} is not what its layout says at its last positions: wrong by {error:.3g} times"
        own = exact
        if self._layout.dtype != torch.float32:
            own, _ = self._hf_backend.run_layer(index, x, self._layout.dtype)
        return LayerAnswer(index=index, states=x, answer=_answer(own, exact, x, _FLOORS[self._layout.dtype]))

    def _error_at_last_positions(self, index: int, x: Tensor, max_len: int) -> float:
        """Of the layout's layer, where queries grow with their position."""
        positions = torch.arange(max_len - len(x), max_len)
        exact, _ = self._hf_backend.run_layer(index, x, torch.float32, positions)
        described = _answer(exact, exact, x, _EXACT).excess(self._reference.run_layer(index, x, positions))
        return _worst_of_ranks(described, self._group)

    def _ask_model(self, token_ids: Tensor) -> Answer:
        exact = self._hf_backend.run_model(token_ids, torch.float32)
        own = exact
        if self._layout.dtype != torch.float32:
            own = self._hf_backend.run_model(token_ids, self._layout.dtype)
        return _answer(own, exact, torch.zeros(()), _FLOORS[self._layout.dtype])

    def _agreed(self, reason: str | None) -> str | None:
        """The reason of this rank, or that another has one."""
        others = self._group.all_gather(torch.tensor([reason is not None]), dim=0)
        return reason or ("differs on another rank" if bool(others.any()) else None)


def _random_states(layout: DecoderLayout, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Rows of the residual stream, of many magnitudes, that the model's dtype holds exactly."""
    scales = torch.logspace(_SMALLEST, _LARGEST, num_tokens)[torch.randperm(num_tokens, generator=generator)]
    states = torch.randn(num_tokens, layout.hidden_size, generator=generator) * scales[:, None]
    return states.to(layout.dtype).float()


def _answer(own: Tensor, exact: Tensor, before: Tensor, floor: float) -> Answer:
    """What Hugging Face's arithmetic gives is `own`, in the model's dtype, and `exact` in float32, from `before`."""
    change = (exact - before).norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return Answer(exact=exact, change=change, allowed=_FACTOR * (own - exact).norm(dim=-1) / change + floor)


def _worst_of_ranks(excess: Tensor, group: TensorParallelGroup) -> float:
    return float(group.all_gather(excess[None], dim=0).max())


def num_bytes(part: object) -> int:
    """Of the tensors of a part of a layout; a tied table counts twice."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(map(num_bytes, part))
    return sum(num_bytes(getattr(part, field.name)) for field in fields(part)) if is_dataclass(part) else 0


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
