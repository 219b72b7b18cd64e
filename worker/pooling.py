"""Pooling: vectors and scores of a prompt's states, the requests' parameters, and the models' facts.

A pooling request is a prompt that draws nothing. The states of some of its tokens, behind the final norm, are added in
float64 in the order of their positions; their mean goes through the model's last layers, and is normalized or becomes
scores. The order is that of the prompt alone, so batches, chunks and ranks change no bit. Plain data.
"""

import math
import re
from array import array
from dataclasses import dataclass
from enum import StrEnum
from operator import mul
from typing import Final, NamedTuple

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import is_flag, is_whole


class PoolingKind(StrEnum):
    """Which states are pooled."""

    LAST = "last"
    """State of the last token."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """State of the first token."""

    def rows(self, num_tokens: int) -> range:
        """Positions whose states are pooled, of a prompt of this many tokens."""
        if self is PoolingKind.LAST:
            return range(num_tokens - 1, num_tokens)
        return range(num_tokens if self is PoolingKind.MEAN else 1)


class PoolingTask(StrEnum):
    """The meaning of a pooled model's outputs."""

    EMBED = "embed"
    """A vector."""
    CLASSIFY = "classify"
    """A score for each label."""


class PoolingActivation(StrEnum):
    """The last step of a pooled model, which a request may leave out."""

    NONE = "none"
    NORMALIZE = "normalize"
    """Divides a vector by its length."""
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a pooling request. The call shape follows vLLM's class of the same name.

    Raises `InvalidRequestError` for a field of a wrong type.
    """

    dimensions: int | None = None
    """Numbers of a vector to keep, its first ones, of a model that was trained so; None: all."""
    use_activation: bool | None = None
    """Whether vectors are normalized, or scores activated; None: as the model says."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and not (is_whole(self.dimensions) and self.dimensions > 0):
            raise InvalidRequestError("dimensions", self.dimensions, "must be a whole number above 0")
        if self.use_activation is not None and not is_flag(self.use_activation):
            raise InvalidRequestError("use_activation", self.use_activation, "must be True or False")


class PoolingFacts(NamedTuple):
    """Facts of a pooling model: all inputs of its results beside its states."""

    task: PoolingTask
    kind: PoolingKind
    activation: PoolingActivation
    num_outputs: int
    """Numbers of a vector, or labels."""
    is_matryoshka: bool = False
    """Whether requests may ask for fewer dimensions."""
    dimensions: tuple[int, ...] = ()
    """Numbers of dimensions they may ask for; empty: any."""
    labels: tuple[str, ...] = ()
    """Names of the labels."""
    prompt: str = ""
    """Text that comes before each text that is embedded."""
    pair_template: str = ""
    """Prompt template of a pair of texts, with {query} and {document}, and optionally {instruction}; empty: there is
    none, and the tokenizer of an encoder joins them.
    """
    is_whole: bool = False
    """Each prompt is computed in one step, and none of it comes from a cache: its tokens see those behind them."""

    def pair(self, query: str, document: str, instruction: str | None) -> str:
        """Prompt of a pair of texts, for a model of scores."""
        said = {"query": query, "document": document, "instruction": instruction or INSTRUCTION}
        return _PLACE.sub(lambda place: said[place[1]], self.pair_template)

    def check(self, params: PoolingParams) -> None:
        """Raises `InvalidRequestError` for dimensions that the model does not have."""
        wanted = params.dimensions
        if wanted is None:
            return
        if not self.is_matryoshka or self.task is not PoolingTask.EMBED:
            limit = (
                f"must not be set: this model's vectors have {self.num_outputs} numbers, and were not trained to be cut"
            )
            raise InvalidRequestError("dimensions", wanted, limit)
        if wanted > self.num_outputs or (self.dimensions and wanted not in self.dimensions):
            some = f"one of {', '.join(map(str, self.dimensions))}" if self.dimensions else "at least 1"
            raise InvalidRequestError("dimensions", wanted, f"must be {some}, and at most {self.num_outputs}")


INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of templates that have one, where a request gives none."""

_PLACE: Final = re.compile(r"\{(query|document|instruction)\}")


def cosine(a: bytes, b: bytes) -> float:
    """Similarity of two vectors, as their results are. All sums are exact, and rounded once."""
    of_a, of_b = array("f", a), array("f", b)
    lengths = math.sqrt(math.fsum(map(mul, of_a, of_a)) * math.fsum(map(mul, of_b, of_b)))
    return math.fsum(map(mul, of_a, of_b)) / max(lengths, 1e-12)


class PoolShare(NamedTuple):
    """Part of a step in the pooling of one sequence."""

    params: PoolingParams
    first_row: int
    """Rows [first_row, end_row) of the sequence's own in the step are added; maybe none."""
    end_row: int
    num_rows: int
    """Rows that are added in all steps together."""
    before: bytes
    """Sums of the steps before, float64; empty: there are none."""
    is_last: bool
    """Whether nothing is left after this step: then its result is final."""


NOT_FINITE: Final = b""
"""Result in place of one with a NaN or an infinity."""
