"""Check at load: whether an executor's results equal the reference executor's for the same layout.

The reference is asked first: each kind of layer and the whole model. Then the executor is checked by its answers: its
error may be about twice that of the reference's arithmetic in the model's dtype. The weights may be gone by then.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.mapped_files import MappedFiles
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.reference import Reference

NUM_TOKENS: Final = 16

_FACTOR: Final = 2.0
"""Allowed error of an executor, as a multiple of the reference's rounding error."""

_FLOORS: Final = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Allowed error on top, relative to the result."""

_QUANTILE: Final = 0.75
"""The share of rows that must agree. In a mixture of experts, some rows may choose others where two are close."""

MAX_REFERENCE_NUMBERS: Final = 1 << 28
"""Most weights of a rank's share, however few bits each has, of which the reference executor runs the whole model: half
a second of CPU for bfloat16."""

_SMALLEST, _LARGEST = -2.0, 0.5
"""Powers of ten between which the rows of random states are scaled. A norm's wrong epsilon shows in small rows only."""


class Executor(Protocol):
    """Runs one rank's share of a layout. All ranks make the same calls. Used with at most `NUM_TOKENS` tokens."""

    def run_layer(self, index: int, x: Tensor) -> Tensor:
        """The residual stream [T, hidden], float32, of one sequence from its first position on, after a layer."""
        ...

    def run_model(self, token_ids: Tensor) -> Tensor | None:
        """Token ids [T] of one sequence from its first position on -> logits [T, vocab], float32, at the leader; other
        ranks may return None.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows that the reference has computed, and how far from them an executor may be."""

    exact: Tensor
    """[T, n], computed in float32."""
    change: Tensor
    """[T]: the length of the addition to the input. Errors count in relation to it."""
    allowed: Tensor
    """[T]"""

    def is_finite(self) -> bool:
        return bool(self.exact.isfinite().all() and self.allowed.isfinite().all())

    def excess(self, ours: Tensor) -> Tensor:
        """The error of `ours`, as a multiple of the allowed error; of the worst row within `_QUANTILE`."""
        error = (ours.float() - self.exact).norm(dim=-1) / self.change
        excess = (error / self.allowed).nan_to_num(torch.inf, torch.inf)
        return torch.quantile(excess, _QUANTILE, interpolation="higher")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnswer:
    """Output of a layer for random states."""

    index: int
    states: Tensor
    """The residual stream [T, hidden] before it."""
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Results of the reference, for checks of executors."""

    layers: tuple[LayerAnswer, ...]
    """One of each kind."""
    token_ids: Tensor
    logits: Answer | None
    """None of a large model: its logits need only be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A layout and the answers of the reference: the input of a native backend."""

    layout: DecoderLayout
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Outcome of a proof; the same on every rank."""

    reason: str | None
    """Why the executor is not to be used, for the log; None: it is."""
    layer_error: float
    """The worst error of a layer, as a multiple of the allowed error; likewise of the whole model."""
    model_error: float


def ask_reference(layout: DecoderLayout, group: TensorParallelGroup, *, max_len: int) -> Answers | str:
    """Results of the reference for a layout; or the part of it that is not finite. A large model is not run as a whole.

    All ranks of the group do so together. `max_len`: the most positions that the model is served with.
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
        if int(group.all_gather(torch.tensor([num_numbers(layout)]), dim=0).max()) <= MAX_REFERENCE_NUMBERS:
            logits = _answer(own.run_model(token_ids), exact.run_model(token_ids), torch.zeros(()), floor)
    answers = [asked.answer for asked in layers] + ([] if logits is None else [logits])
    is_finite = all(answer.is_finite() for answer in answers)
    if not group.all_gather(torch.tensor([is_finite]), dim=0).all():
        return f"its states are NaN or infinite in {layout.dtype}"
    return Answers(layers=tuple(layers), token_ids=token_ids, logits=logits)


def check(executor: Executor, answers: Answers, group: TensorParallelGroup) -> Proof:
    """Compares an executor with the answers of the reference. All ranks of the group do so together."""
    worst = 0.0
    with torch.inference_mode():
        for asked in answers.layers:
            error = _worst_of_ranks(asked.answer.excess(executor.run_layer(asked.index, asked.states)), group)
            worst = max(worst, error)
            if error > 1.0:
                reason = f"layer {asked.index} is wrong by {error:.3g} times the allowed error"
                return Proof(reason=reason, layer_error=worst, model_error=0.0)
        logits = executor.run_model(answers.token_ids)
        excess = torch.zeros(()) if logits is None else _excess_of_logits(answers.logits, logits)
        error = _worst_of_ranks(excess, group)
    wrong = None if error <= 1.0 else f"its logits are wrong by {error:.3g} times the allowed error"
    return Proof(reason=wrong, layer_error=worst, model_error=error)


def _excess_of_logits(expected: Answer | None, logits: Tensor) -> Tensor:
    if expected is not None:
        return expected.excess(logits)
    return torch.tensor(0.0 if logits.isfinite().all() else torch.inf)


def _random_states(layout: DecoderLayout, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Rows of the residual stream, of many magnitudes, that the model's dtype holds exactly."""
    scales = torch.logspace(_SMALLEST, _LARGEST, num_tokens)[torch.randperm(num_tokens, generator=generator)]
    states = torch.randn(num_tokens, layout.hidden_size, generator=generator) * scales[:, None]
    return states.to(layout.dtype).float()


def _answer(own: Tensor, exact: Tensor, before: Tensor, floor: float) -> Answer:
    """Answer of the reference: `own`, rounded to the model's dtype, and `exact` in float32, from `before`."""
    change = (exact - before).norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return Answer(exact=exact, change=change, allowed=_FACTOR * (own - exact).norm(dim=-1) / change + floor)


def _worst_of_ranks(excess: Tensor, group: TensorParallelGroup) -> float:
    return float(group.all_gather(excess[None], dim=0).max())


def num_numbers(part: object) -> int:
    """Numbers that a part of a layout has, stored ones once they are dequantized; a tied table counts twice."""
    if isinstance(part, Tensor):
        return part.numel()
    if isinstance(part, StoredMatrix):
        return prod(part.num_rows_columns)
    if isinstance(part, tuple):
        return sum(map(num_numbers, part))
    return sum(num_numbers(getattr(part, field.name)) for field in fields(part)) if is_dataclass(part) else 0


def _kind(part: object) -> object:
    """All of a part of a layout but the values of its tensors."""
    if isinstance(part, Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, tuple):
        return tuple(_kind(item) for item in part)
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    return part


def made_if_small(layout: DecoderLayout) -> DecoderLayout:
    """The layout, with all codes in memory if the reference runs the whole model, since it reads the weights several
    times; of a large model codes are made as rows are packed. Raises `NotFiniteError`.
    """
    return _made(layout) if num_numbers(layout) <= MAX_REFERENCE_NUMBERS else layout


def _made(part: Any) -> Any:
    if isinstance(part, StoredMatrix):
        return part.with_codes()
    if isinstance(part, tuple):
        made = tuple(_made(item) for item in part)
        return part if all(one is other for one, other in zip(made, part, strict=True)) else made
    if not is_dataclass(part) or isinstance(part, type):
        return part
    old = {field.name: getattr(part, field.name) for field in fields(part)}
    new = {name: _made(value) for name, value in old.items()}
    return part if all(new[name] is value for name, value in old.items()) else replace(part, **new)
