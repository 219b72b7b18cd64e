"""Statement of what a family has as an encoder, whose tokens see those behind them too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class HeadPart(NamedTuple):
    """A layer behind the pooled state of a model of scores: a linear, or a LayerNorm."""

    module: str
    function: str = "none"
    """Activation behind a linear: none, tanh or gelu."""
    eps: float | None = None
    """Epsilon of a LayerNorm; None: it is a linear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Part of a family whose tokens see those behind them too. Names are of modules in the model's base."""

    embedding_norm: str
    """Norm of the embedding, which takes its place. The first layer has no `attention_norm`."""
    norms_stay: bool = False
    """Norms are behind the residual sums: `attention_norm` is the one at a layer's end, before the next layer, and
    `mlp_norm` the one behind its attention."""
    positions: str | None = None
    """Table of learned positions; None: there are none."""
    segments: str | None = None
    """Table of what the tokens of a prompt's first text have in common, and those of its second, beside positions."""
    has_second_segment: bool = True
    """The second row of that table is used."""
    head: Callable[[Mapping[str, Any]], tuple[HeadPart, ...]]
    """Layers behind the pooled state of a model of scores, by config.json."""
    kind: Callable[[Mapping[str, Any]], str] = lambda raw: "cls"
    """States that such a model pools."""
