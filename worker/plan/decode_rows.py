"""Decode rows of a step plan: the sequences that compute one token and draw one, as columns.

Nearly all that a busy engine does is such rows, and from one step to the next each is one position further. So the
columns are made when a sequence joins or leaves, and a step advances all of them by one number. What may not live here:
deciding who decodes so (`worker/scheduling/decode_batch.py`), torch, numpy.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.worker.plan.step_plan import DrawParams


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
