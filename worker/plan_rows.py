"""Decode rows of a step plan: the sequences that compute one token and draw one, as columns.

Nearly all that a busy engine does is such rows, and from one step to the next each is one position further. So the
columns are made when a sequence joins or leaves, and a step advances all of them by one number.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.worker.request import EngineRequest

if TYPE_CHECKING:
    from holdfast.worker.step_plan import DrawParams


class DecodeColumns:
    """What stays as it is while the same sequences decode. Nothing of it changes once it is made."""

    __slots__ = (
        "ask_for_logprobs",
        "draws",
        "first_output_indices",
        "first_positions",
        "need_logits",
        "num_context_tokens",
        "ones",
        "sequence_ids",
    )

    def __init__(
        self,
        sequence_ids: Sequence[int],
        first_positions: Sequence[int],
        first_output_indices: Sequence[int],
        draws: "Sequence[DrawParams]",
    ) -> None:
        self.sequence_ids = sequence_ids
        self.first_positions = array("q", first_positions)
        """At age 0."""
        self.first_output_indices = first_output_indices
        """At age 0."""
        self.draws = draws
        """At any output position; all of them without logits settings."""
        self.need_logits = self.ask_for_logprobs = False
        """Whether some draw takes more than the argmax of its row, and whether some draw reports log-probabilities."""
        for draw in draws:
            self.need_logits = self.need_logits or draw.needs_logits
            self.ask_for_logprobs = self.ask_for_logprobs or draw.num_logprobs is not None
        self.ones = array("q", (1,)) * len(first_positions)
        """How many tokens each row computes, and how many it draws."""
        self.num_context_tokens = sum(first_positions) + len(first_positions)
        """Position + 1, summed over the rows, at age 0."""


class BlockTables:
    """The blocks of each row, and the same as integers in a row. Nothing of it changes once it is made."""

    __slots__ = ("num_blocks", "packed", "tables")

    def __init__(self, tables: Sequence[tuple[int, ...]], packed: Sequence["array[int]"]) -> None:
        """`packed` are the same tables as arrays."""
        self.tables = tables
        self.num_blocks = array("q", map(len, tables))
        self.packed = bytearray().join(packed)


class DecodeRows:
    """The rows of one step, each with one token at position `first_positions + age` of its columns."""

    __slots__ = ("age", "blocks", "columns", "num_context_tokens", "num_steps", "token_ids")

    def __init__(
        self, columns: DecodeColumns, age: int, token_ids: Sequence[int], blocks: BlockTables, num_steps: int = 1
    ) -> None:
        self.columns = columns
        self.age = age
        """Steps since the columns were made."""
        self.token_ids = array("q", token_ids)
        self.blocks = blocks
        self.num_context_tokens = columns.num_context_tokens + age * len(self.token_ids)
        """Position + 1, summed over the rows: the tokens that they attend to."""
        self.num_steps = num_steps
        """Steps to be run one after the other, each with the tokens that the one before it drew. More than one only
        where all rows take the argmax and the plan has no other sequences."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def draws(self) -> "list[DrawParams]":
        """The draw of each row."""
        columns, age = self.columns, self.age
        return [draw.at(index + age) for draw, index in zip(columns.draws, columns.first_output_indices, strict=True)]


NO_ROWS: Final = DecodeRows(DecodeColumns((), (), (), ()), 0, (), BlockTables((), ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSettings:
    """The settings of one request. Token ids are 64-bit arrays where they may be many, so that a step need not convert
    them; ids that the model does not have are no error, and do nothing.
    """

    allowed_token_ids: "array[int] | None" = None
    """None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids whose last one is banned where the output ends in the others."""
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Banned while there are fewer than `min_tokens` outputs."""
    grammar: str = ""
    """What the output must match, as llguidance writes it; empty: anything."""
    avoided_token_ids: tuple[int, ...] = ()
    """Banned while anything else is left: ends of sequence of an output with a grammar that is to ignore them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    biased_token_ids: "array[int]" = field(init=False, repr=False, compare=False)
    """Of `logit_bias`."""
    biases: "array[float]" = field(init=False, repr=False, compare=False)
    """Of `logit_bias`, in float32."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_token_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """The distinct tokens of the prompt, where the repetition penalty asks for them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "biased_token_ids", _array(token_id for token_id, _ in self.logit_bias))
        object.__setattr__(self, "biases", array("f", [bias for _, bias in self.logit_bias]))

    @classmethod
    def of(cls, request: EngineRequest, eos_token_ids: frozenset[int]) -> "LogitsSettings | None":
        """The settings of a request; None, at no cost later, for one that uses none."""
        params = request.sampling_params
        repeats = params.repetition_penalty != 1
        penalizes = repeats or params.frequency_penalty != 0 or params.presence_penalty != 0
        bans = request.bad_word_token_ids or params.min_tokens or params.allowed_token_ids is not None
        if not (penalizes or bans or request.grammar or params.logit_bias):
            return None
        return cls(
            allowed_token_ids=None if params.allowed_token_ids is None else _array(params.allowed_token_ids),
            bad_words=request.bad_word_token_ids,
            min_tokens=params.min_tokens,
            # Every end of sequence, also if it would not end this one: `ignore_eos` is no wish to see it early.
            end_token_ids=tuple(sorted(eos_token_ids.union(params.stop_token_ids))) if params.min_tokens else (),
            grammar=request.grammar,
            avoided_token_ids=tuple(sorted(eos_token_ids)) if params.ignore_eos and request.grammar else (),
            logit_bias=tuple(params.logit_bias.items()),
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            prompt_token_ids=_array(sorted(set(request.prompt_token_ids)) if repeats else ()),
        )

    @property
    def penalize(self) -> bool:
        """Some penalty is not neutral."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def look_back(self) -> bool:
        """They depend on which tokens the output has, not only on how many."""
        return self.penalize or bool(self.bad_words) or bool(self.grammar)

    def apply_after(self, num_output_tokens: int) -> bool:
        """Whether they can change any draw from here on."""
        lasting = self.look_back or bool(self.logit_bias) or self.allowed_token_ids is not None
        return lasting or num_output_tokens < self.min_tokens


def _array(token_ids: Iterable[int]) -> "array[int]":
    return array("q", token_ids)
