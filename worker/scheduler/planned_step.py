"""Planned step: the sequences of a plan, as decode rows and as shares, and what its result makes of them.

A sequence decodes plainly when it computes its last token, draws one, and nothing about the draw depends on more than
its settings and its position: no look-back, no drafts. Its row is made when a sequence joins or leaves the batch; each
step advances all rows by one position. All other sequences (prompts, drafts, draws with look-back) are shares, made
anew at each step.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from holdfast.worker.draws import DrawParams
from holdfast.worker.request import TokenDelta, TokenLogprob
from holdfast.worker.scheduler.batching import Share
from holdfast.worker.scheduler.kept_prefixes import keep_state, states_left_by
from holdfast.worker.scheduler.prompt_outputs import commit_pooled, pool_share, prompt_logprob_params
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.scheduler.speculation import NO_DRAFTS, Drafter, Drafts
from holdfast.worker.step_plan import BlockTables, DecodeColumns, DecodeRows, ScheduledSequence, StepPlan, StepResult
from holdfast.worker.waiting_queue import Tenant

_NEVER: Final = -1  # equals no count of moves

# At every step for every sequence, so C rather than comprehensions.
_sequence: Final = itemgetter(0)
_sequence_id: Final = attrgetter("sequence_id")
_adapter_slot: Final = attrgetter("adapter_slot")
_block_ids: Final = attrgetter("block_ids")
_window_block_ids: Final = attrgetter("window.block_ids")
_token_ids: Final = attrgetter("token_ids")
_last: Final = itemgetter(-1)


class _Row:
    """Values computed once for a sequence, as long as it stays in the batch."""

    __slots__ = ("block_ids", "draw", "lead", "packed")

    def __init__(self, sequence: Sequence) -> None:
        self.draw: DrawParams = sequence.draw_params()
        self.lead = self.draw.first_output_index - sequence.num_computed_tokens
        """Distance from the position of a token to the output position of the one drawn after it."""
        self.block_ids: list[tuple[int, ...]] = [(), ()]
        """Block tables of layers that see all, and of those with a window; and the same as integers in a row."""
        self.packed = [array("q"), array("q")]


class RowsInFlight(NamedTuple):
    """The sequences of one plan's rows, in their order, with their data. Nothing of it changes."""

    sequences: list[Sequence]
    num_by_tenant: Mapping[Tenant, int]
    ending_block: list[Sequence]
    """Sequences whose row is the last of a block, in the last of its steps."""
    num_steps: int = 1


_NO_TABLES: Final = BlockTables((), ())

NOBODY: Final = RowsInFlight([], {}, [])


class DecodeBatch:
    """The plain decodes of one scheduler. `split` is called for each step, `commit` with its result.

    Where the next step is split before that, `foresee` comes in between.
    """

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._block_size = queues.fill_size
        self._sequences: list[Sequence] = []  # in the order of their rows
        self._num_by_tenant: dict[Tenant, int] = {}  # their numbers
        self._rows: dict[Sequence, _Row] = {}
        self._columns = DecodeColumns((), (), (), ())
        self._blocks = self._window_blocks = _NO_TABLES
        # By the age modulo the block size: the sequences whose row is the last of a block.
        self._ending_block: dict[int, list[Sequence]] = {}
        self._age = 0
        # Chosen from these, in the order of the shares, at this count of moves in the queues. While both are the same,
        # no sequence has joined or left, and each is one token further than in the last split.
        self._chosen_from: list[Sequence] = []
        self._num_moves = _NEVER
        self._others: list[int] = []  # numbers of the sequences that were not chosen

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
            self._blocks = self._packed(tables, 0)
        if self._queues.windows is not None:
            tables = list(map(_window_block_ids, self._sequences))
            if tables != self._window_blocks.tables:
                self._window_blocks = self._packed(tables, 1)
        token_ids = list(map(_last, map(_token_ids, self._sequences)))
        num_steps = 1 if max_steps == 1 or others or self._columns.need_logits else self._num_steps(max_steps)
        ending = self._ending_block.get((self._age + num_steps - 1) % self._block_size, [])
        in_flight = RowsInFlight(self._sequences, self._num_by_tenant, ending, num_steps)
        of_windows = None if self._queues.windows is None else self._window_blocks
        rows = DecodeRows(self._columns, self._age, token_ids, self._blocks, num_steps, of_windows)
        return rows, in_flight, others

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
            if sequence.is_broken:
                broken.append(sequence)
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
                if self._queues.slots is not None:
                    keep_state(sequence, self._queues.slots, self._block_size, sequence.num_computed_tokens - 1, 1)
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
        """Steps, at most `most`, before a row ends or needs another block."""
        size, windows = self._queues.allocator.block_size, self._queues.windows
        for sequence in self._sequences:
            left = sequence.max_len - len(sequence.token_ids)
            room = len(sequence.block_ids) * size - sequence.num_computed_tokens
            if windows is not None and sequence.window is not None:
                in_window = len(sequence.window.block_ids) * windows.window.block_size
                room = min(room, in_window - sequence.num_computed_tokens)
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
        size = self._queues.allocator.block_size
        return (
            num_tokens == 1
            and sequence.decodes_plainly
            and len(sequence.block_ids) * size < len(sequence.token_ids) + size
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
        slots: list[int] = []
        if self._queues.slots is not None:
            slots += [sequence.state_slot for sequence in chosen if sequence.state_slot is not None]
        adapter_slots = list(map(_adapter_slot, chosen))
        self._columns = DecodeColumns(list(map(_sequence_id, chosen)), positions, indices, draws, slots, adapter_slots)
        self._num_by_tenant = num_by_tenant
        self._age, self._num_moves = 0, self._queues.num_moves
        self._ending_block = ending_block
        self._blocks = self._window_blocks = _NO_TABLES

    def _packed(self, tables: list[tuple[int, ...]], number: int) -> BlockTables:
        """Table `number` of each row. Blocks are given and taken one sequence at a time, so most tables are the very
        ones of the last step.
        """
        packed = []
        for row, block_ids in zip(self._rows.values(), tables, strict=True):
            if block_ids is not row.block_ids[number]:
                row.block_ids[number], row.packed[number] = block_ids, array("q", block_ids)
            packed.append(row.packed[number])
        return BlockTables(tables, packed)


def scheduled_sequence(
    sequence: Sequence, num_tokens: int, drafts: Drafts, queues: SequenceQueues
) -> ScheduledSequence:
    """The next `num_tokens` tokens of a running sequence, and drafts after them."""
    first, block_ids, windows = sequence.num_computed_tokens, sequence.block_ids, queues.windows
    end = first + num_tokens
    pool = None if sequence.pool_rows is None else pool_share(sequence, num_tokens)
    draws = end == len(sequence.token_ids) and pool is None
    last = end if drafts is NO_DRAFTS else end + drafts.num_tokens
    num_blocks = -(-last // queues.allocator.block_size)
    window_block_ids: tuple[int, ...] = ()
    if windows is not None and sequence.window is not None:
        window_block_ids = sequence.window.block_ids[: windows.window.num_blocks_for(last)]
    prompt_logprobs = None
    if sequence.prompt_logprobs is not None and sequence.num_missing_prompt_logprobs:
        prompt_logprobs = prompt_logprob_params(sequence, num_tokens)
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        first_position=first,
        token_ids=(*sequence.token_ids[first:end], *drafts.token_ids),
        block_ids=block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks],
        window_block_ids=window_block_ids,
        draw=sequence.draw_params() if draws else None,
        num_draws=1 + len(drafts.token_ids) if draws else 0,
        drafting=drafts.drafting,
        prompt_logprobs=prompt_logprobs,
        state_slot=sequence.state_slot,
        adapter_slot=sequence.adapter_slot,
        num_drafts=len(drafts.token_ids),
        second_start=sequence.request.second_start,
        pool=pool,
    )


class ShareCommit:
    """Commit of one scheduler's steps."""

    def __init__(
        self, queues: SequenceQueues, drafter: Drafter | None, drop_broken: Callable[[Sequence], None]
    ) -> None:
        """`drop_broken` is called for a sequence that no token can follow, before the next one is looked at:
        its blocks may not be found.
        """
        self._queues = queues
        self._drafter = drafter
        self._block_size = queues.allocator.block_size
        self._fill_size = queues.fill_size
        self._drop_broken = drop_broken

    def take(
        self, sequences: list[Sequence], shares: SequenceOf[ScheduledSequence], result: StepResult
    ) -> list[TokenDelta]:
        """A delta for each sequence that gained tokens. Ended sequences are skipped."""
        deltas = []
        logprobs = result.logprobs or ((),) * len(sequences)
        prompt_logprobs = result.prompt_logprobs or ((),) * len(sequences)
        for sequence, scheduled, drawn, likely, likely_prompt in zip(
            sequences, shares, result.token_ids, logprobs, prompt_logprobs, strict=True
        ):
            assert len(drawn) == scheduled.num_draws, f"{len(drawn)} tokens for {scheduled.num_draws} draws"
            num_lost = max(0, sequence.num_discarded_tokens - scheduled.first_position)
            self._queues.counts.num_tokens_recomputed += min(num_lost, len(scheduled.token_ids))
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if likely_prompt and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += likely_prompt
            if len(scheduled.token_ids) == scheduled.num_draws == 1 and sequence.num_output_tokens > 0:
                delta = sequence.decode(drawn, likely)
            else:
                num_before = sequence.num_uncomputed_tokens
                if scheduled.pool is None:
                    delta = sequence.commit(scheduled, drawn, likely)
                else:
                    delta = commit_pooled(sequence, scheduled, result.pooled.get(sequence.sequence_id))
                self._queues.num_uncomputed_tokens += sequence.num_uncomputed_tokens - num_before
            if sequence.is_broken:
                self._drop_broken(sequence)
                continue
            if delta is not None:
                deltas.append(delta)
            self._settle(sequence, scheduled, delta.token_ids if delta else ())
            if sequence.num_draft_tokens and delta is not None and (delta.finish_reason or len(delta.token_ids) > 1):
                delta.num_draft_tokens = sequence.num_draft_tokens
                delta.num_accepted_tokens = sequence.num_accepted_tokens
        return deltas

    def _settle(self, sequence: Sequence, scheduled: ScheduledSequence, gained: tuple[int, ...]) -> None:
        """Charges the tenant for the tokens that a sequence gained in a step, and caches blocks that became full."""
        sequence.tenant.charge(0, len(gained))
        if self._drafter is not None:
            self._drafter.settle(sequence, scheduled, gained, self._queues)
        if scheduled.first_position % self._fill_size + len(scheduled.token_ids) >= self._fill_size:
            self._queues.store_full_blocks(sequence, scheduled.first_position)
            if (slots := self._queues.slots) is not None:
                keep_state(sequence, slots, self._block_size, scheduled.first_position, states_left_by(scheduled))
            if sequence.to_pin:
                self._queues.pinning.pin(sequence)


MAX_SHARE_HELD_UP: Final = 1 / 8
"""Largest share of a step's sequences that may be held up by planning the next one ahead. A sequence that is left out
gets its next token a whole step later; the others gain the host's part of a step, which is a fraction of it."""


class StepInFlight:
    """A plan that was handed out and is not committed."""

    __slots__ = ("is_foreseen", "left_out", "plan", "rows", "sequences")

    def __init__(self, plan: StepPlan, rows: RowsInFlight, sequences: list[Sequence]) -> None:
        """`rows` are the sequences of the plan's decodes, the first of all its `sequences`."""
        self.plan = plan
        self.rows = rows
        self.sequences = sequences
        """All of them, in the order of the plan."""
        self.is_foreseen = False
        self.left_out: list[Sequence] = []
        """Sequences among those looked at that await the result."""

    def foresee(self, queues: SequenceQueues) -> None:
        """Takes the step as done, for all whose next step can be planned without its result. Once."""
        assert not self.is_foreseen, "a step is foreseen once"
        self.is_foreseen = True
        for sequence in self.rows.sequences:
            self._foresee(sequence, 1, 1)
        for sequence, scheduled in zip(self.sequences[len(self.rows.sequences) :], self.plan.others, strict=True):
            num_before = sequence.num_uncomputed_tokens
            self._foresee(sequence, len(scheduled.token_ids), scheduled.num_draws)
            queues.num_uncomputed_tokens += sequence.num_uncomputed_tokens - num_before

    @property
    def holds_up_too_many(self) -> bool:
        """Whether too many sequences that depend on this step's result would miss the next step."""
        num_held_up = sum(not sequence.is_about_to_end for sequence in self.left_out)
        return num_held_up > MAX_SHARE_HELD_UP * len(self.sequences)

    def _foresee(self, sequence: Sequence, num_tokens: int, num_draws: int) -> None:
        if sequence.status is SequenceStatus.RUNNING and not sequence.foresee(num_tokens, num_draws):
            self.left_out.append(sequence)
