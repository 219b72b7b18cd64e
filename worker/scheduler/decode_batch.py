"""Decode batch: the sequences that decode plainly, step after step, and the rows of a plan that stand for them.

A sequence decodes plainly when it computes its last token, draws one, and nothing about the draw depends on more than
its settings and its position: no look-back, no drafts. Its rows are made when somebody joins or leaves; a step moves
all of them on by one number.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from holdfast.worker.plan_rows import BlockTables, DecodeColumns, DecodeRows
from holdfast.worker.request import TokenDelta, TokenLogprob
from holdfast.worker.scheduler.batching import Share
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.step_plan import DrawParams
from holdfast.worker.waiting_queue import Tenant

_NEVER: Final = -1

# At every step for every sequence, so C rather than comprehensions.
_sequence: Final = itemgetter(0)
_sequence_id: Final = attrgetter("sequence_id")
_block_ids: Final = attrgetter("block_ids")
_token_ids: Final = attrgetter("token_ids")
_last: Final = itemgetter(-1)


class _Row:
    """What is worked out once for a sequence, as long as it stays in the batch."""

    __slots__ = ("block_ids", "draw", "lead", "packed")

    def __init__(self, sequence: Sequence) -> None:
        self.draw: DrawParams = sequence.draw_params()
        self.lead = self.draw.first_output_index - sequence.num_computed_tokens
        """From the position of a token to the output position of the one drawn after it."""
        self.block_ids: tuple[int, ...] = ()
        self.packed = array("q")


class RowsInFlight(NamedTuple):
    """The sequences of one plan's rows, in their order, and what is known of them. Nothing of it changes."""

    sequences: list[Sequence]
    num_by_tenant: Mapping[Tenant, int]
    ending_block: list[Sequence]
    """Those whose row is the last of a block, in the last of its steps."""
    num_steps: int = 1


NOBODY: Final = RowsInFlight([], {}, [])


class DecodeBatch:
    """The plain decodes of one scheduler. `split` is called for each step, `commit` with its result.

    Where the next step is split before that, `foresee` comes in between.
    """

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._block_size = queues.allocator.block_size
        self._sequences: list[Sequence] = []  # in the order of their rows
        self._num_by_tenant: dict[Tenant, int] = {}  # how many of them each has
        self._rows: dict[Sequence, _Row] = {}
        self._columns = DecodeColumns((), (), (), ())
        self._blocks = BlockTables((), ())
        # By the age modulo the block size: those whose row is then the last of a block.
        self._ending_block: dict[int, list[Sequence]] = {}
        self._age = 0
        # Chosen from these, in the order of the shares, after so many moves in the queues. While both are the same,
        # nobody has joined or left, and each is one token further than in the last split.
        self._chosen_from: list[Sequence] = []
        self._num_moves = _NEVER
        self._others: list[int] = []  # numbers of those that were not chosen

    def split(self, shares: list[Share], max_steps: int = 1) -> tuple[DecodeRows, RowsInFlight, list[Share]]:
        """The rows of a step, whose they are, and those of its shares that are no plain decodes. The rows are for up to
        `max_steps` steps where none of them ends before or needs another block, and nothing but the argmax is drawn.
        """
        sequences = list(map(_sequence, shares))
        if self._num_moves != self._queues.num_moves or sequences != self._chosen_from:
            self._choose(shares, sequences)
        others = list(map(shares.__getitem__, self._others))
        if others and any(map(self._is_plain, others)):
            self._choose(shares, sequences)
            others = list(map(shares.__getitem__, self._others))
        tables = list(map(_block_ids, self._sequences))
        if tables != self._blocks.tables:
            self._update_blocks(tables)
        token_ids = list(map(_last, map(_token_ids, self._sequences)))
        num_steps = 1 if max_steps == 1 or others or self._columns.need_logits else self._num_steps(max_steps)
        ending = self._ending_block.get((self._age + num_steps - 1) % self._block_size, [])
        in_flight = RowsInFlight(self._sequences, self._num_by_tenant, ending, num_steps)
        return DecodeRows(self._columns, self._age, token_ids, self._blocks, num_steps), in_flight, others

    def foresee(self) -> None:
        """The rows of the last split are one token further, before they are committed."""
        self._age += 1

    def commit(
        self,
        rows_in_flight: RowsInFlight,
        drawn: SequenceOf[tuple[int, ...]],
        logprobs: SequenceOf[tuple[TokenLogprob, ...]],
        *,
        was_foreseen: bool,
    ) -> tuple[list[TokenDelta], list[Sequence]]:
        """These rows, of the oldest split that was not committed, have drawn the first of these tuples of tokens.
        Returns deltas, and sequences that are broken.
        """
        sequences, num_steps = rows_in_flight.sequences, rows_in_flight.num_steps
        deltas: list[TokenDelta] = []
        broken: list[Sequence] = []
        for sequence, token_ids, likely in zip(sequences, drawn, logprobs or repeat(()), strict=False):
            if sequence.status is not SequenceStatus.RUNNING:  # it has ended meanwhile
                continue
            delta = sequence.decode(token_ids, likely)
            if delta is None:
                broken.append(sequence)
                continue
            deltas.append(delta)
            if num_steps > 1 and len(delta.token_ids) < num_steps and delta.finish_reason is None:
                self.forget()  # it stopped short: its row is not where the columns say
        if num_steps > 1 or len(deltas) < len(sequences):
            self._charge_each(sequences, deltas)
        else:
            for tenant, num_tokens in rows_in_flight.num_by_tenant.items():
                tenant.charge(0, num_tokens)
        for sequence in rows_in_flight.ending_block:
            if sequence.status is SequenceStatus.RUNNING and not sequence.is_broken:
                self._queues.store_full_blocks(sequence, sequence.num_computed_tokens - 1)
        if not was_foreseen:
            self._age += num_steps
        return deltas, broken

    def _charge_each(self, sequences: list[Sequence], deltas: list[TokenDelta]) -> None:
        """Charges tenants for what each of their sequences gained: `deltas` are of some of `sequences`, in order."""
        counts: Counter[Tenant] = Counter()
        left = iter(sequences)
        for delta in deltas:
            sequence = next(left)
            while sequence.attempt != delta.attempt:
                sequence = next(left)
            counts[sequence.tenant] += len(delta.token_ids)
        for tenant, num_tokens in counts.items():
            tenant.charge(0, num_tokens)

    def _num_steps(self, most: int) -> int:
        """How many steps go by, of at most so many, before a row ends or needs another block."""
        size = self._block_size
        for sequence in self._sequences:
            left = sequence.max_len - len(sequence.token_ids)
            room = len(sequence.block_ids) * size - sequence.num_computed_tokens
            most = min(most, left, room)
        return most

    def forget(self) -> None:
        """The rows of the last split were not computed, or not as they were: the next split starts over."""
        self._num_moves = _NEVER

    def check_integrity(self) -> None:
        """Raises AssertionError unless the rows are what their sequences say. For between two steps. O(rows)."""
        if self._num_moves != self._queues.num_moves:
            return  # the next split starts over
        columns = self._columns
        for number, sequence in enumerate(self._sequences):
            position = columns.first_positions[number] + self._age
            is_right = position == sequence.num_computed_tokens == len(sequence.token_ids) - 1
            assert is_right, f"sequence {sequence.sequence_id} is not where its row is, {position}"
            assert columns.sequence_ids[number] == sequence.sequence_id, "rows and sequences are in another order"

    def _is_plain(self, share: Share) -> bool:
        sequence, num_tokens = share
        return (
            num_tokens == 1
            and sequence.decodes_plainly
            and len(sequence.block_ids) * self._block_size < len(sequence.token_ids) + self._block_size
        )

    def _choose(self, shares: list[Share], sequences: list[Sequence]) -> None:
        rows: dict[Sequence, _Row] = {}
        positions, indices, draws = [], [], []
        others: list[int] = []
        num_by_tenant: Counter[Tenant] = Counter()
        ending_block: dict[int, list[Sequence]] = defaultdict(list)
        for number, share in enumerate(shares):
            if not self._is_plain(share):
                others.append(number)
                continue
            sequence, position = share[0], share[0].num_computed_tokens
            row = rows[sequence] = self._rows.get(sequence) or _Row(sequence)
            positions.append(position)
            indices.append(row.lead + position)
            draws.append(row.draw)
            num_by_tenant[sequence.tenant] += 1
            ending_block[-(position + 1) % self._block_size].append(sequence)
        chosen = list(rows)
        self._sequences, self._rows, self._chosen_from, self._others = chosen, rows, sequences, others
        self._columns = DecodeColumns(list(map(_sequence_id, chosen)), positions, indices, draws)
        self._num_by_tenant = num_by_tenant
        self._age, self._num_moves = 0, self._queues.num_moves
        self._ending_block = ending_block
        self._blocks = BlockTables((), ())

    def _update_blocks(self, tables: list[tuple[int, ...]]) -> None:
        """Blocks are given and taken one sequence at a time, so most tables are the very ones of the last step."""
        packed = []
        for row, block_ids in zip(self._rows.values(), tables, strict=True):
            if block_ids is not row.block_ids:
                row.block_ids, row.packed = block_ids, array("q", block_ids)
            packed.append(row.packed)
        self._blocks = BlockTables(tables, packed)
