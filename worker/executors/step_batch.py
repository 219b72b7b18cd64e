"""Step batch: a plan as arrays, and the one array in which the leader broadcasts a step to the other ranks.

    packed:  [S, T, B, C, P, A, D, W, V, E, L, F, G, Q, Y, step id, with logits, with masses, steps |
              S first positions | S token counts | S draw counts | S block counts | T ids | B blocks | C sources |
              C destinations | C slot counts | P rows | A state slots | A draft counts | D sources | D destinations |
              W window block counts | V window blocks | E sources | E destinations | E slot counts | L adapter slots |
              F idle blocks | G idle slots | Q pooled rows | Y second starts]

It is one int64 array. C, the block copies, and P, the rows that give prompt log-probabilities, are nearly always 0. A
is S for a model that keeps states, else 0; D are the copies of states. W is S if layers with a window have separate
blocks, else 0; E are the copies of those. L is S where a sequence has an adapter, else 0. F and G are blocks and slots
that are idle, Q the rows whose states are pooled. Y is S where a sequence has two texts, else 0.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.draws import DrawParams
from holdfast.worker.pending_tokens import KNOWN, drawing_rows, has_pending
from holdfast.worker.step_plan import BlockCopy, DecodeRows, ScheduledSequence, StepPlan

IntArray = NDArray[np.int64]

_HEADER_WORDS: Final = 19

_NO_ROWS: Final = np.zeros(0, dtype=np.int64)
_NO_COPIES: Final = np.zeros((3, 0), dtype=np.int64)
_NO_STATE_COPIES: Final = np.zeros((2, 0), dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step: S sequences with T tokens in all, packed one after the other in the order of the plan.

    Made at every step on every rank, so no frozen class, which takes longer to make.
    """

    step_id: int
    token_ids: IntArray
    """[T] below 0 in place of a token that the step before samples: -1 - its row among the sampled rows of that
    step.
    """
    first_positions: IntArray
    """[S] position of each sequence's first token of this step."""
    num_tokens: IntArray
    """[S]"""
    num_draws: IntArray
    """[S] number of a sequence's last rows from which tokens are sampled."""
    block_ids: IntArray
    """The sequences' block tables, one after the other."""
    num_blocks: IntArray
    """[S] length of each block table."""
    block_copies: IntArray
    """[3, C] sources, destinations and numbers of slots, to be copied before the step (see `StepPlan`)."""
    logits_rows: IntArray
    """[R] rows among T whose logits are needed: all sampled rows, in the order of the plan, and then all rows with
    prompt logprobs.
    """
    state_slots: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[S] the slot of each sequence's state; empty for a model that keeps none."""
    num_drafts: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[S] number of a sequence's last tokens that are drafts, for a model that keeps states: its next step begins after
    its accepted drafts, so the state before each draft is kept. Empty like `state_slots`.
    """
    state_copies: IntArray = field(default_factory=lambda: _NO_STATE_COPIES)
    """[2, D] sources and destinations among the slots, to be copied before the step, one after the other."""
    idle_blocks: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Blocks, ascending, whose memory is given back after the copies."""
    idle_slots: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Likewise slots."""
    window_block_ids: IntArray = field(default_factory=lambda: _NO_ROWS)
    """The sequences' block tables of layers with a window, one after the other, if these have separate blocks; else
    empty: all layers share the blocks.
    """
    num_window_blocks: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[S] length of each such table. Empty like those."""
    window_copies: IntArray = field(default_factory=lambda: _NO_COPIES)
    """[3, E] as `block_copies`, of layers with a window."""
    adapter_slots: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[S] slot of each sequence's adapter, 0 for none; empty where no sequence has one."""
    pooled_rows: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[Q] rows among T whose states are pooled, in the order of the plan; they have no logits."""
    second_starts: IntArray = field(default_factory=lambda: _NO_ROWS)
    """[S] position of each sequence's first token of the second of two texts, 0 for none; empty where no sequence has
    two.
    """
    with_logits: bool = True
    """False: their argmax is enough."""
    with_masses: bool = False
    """Whether log-probabilities will be made of them."""
    num_steps: int = 1
    """Steps to be run: of more than one each row has a token, the next steps' are their argmax."""
    draws: Callable[[], list[DrawParams] | None] | None = None
    """On the leader, the sampling arguments, for an executor that samples in the step. Not packed."""

    @classmethod
    def decoding(cls, count: int, context: int, block_size: int) -> "StepBatch":
        """A step for warming up: `count` sequences, each with the last of `context` tokens, all in the first block. For
        a model that keeps no states.
        """
        num_blocks = -(-context // block_size)
        return cls(
            step_id=0,
            token_ids=np.zeros(count, dtype=np.int64),
            first_positions=np.full(count, context - 1),
            num_tokens=np.ones(count, dtype=np.int64),
            num_draws=np.ones(count, dtype=np.int64),
            block_ids=np.zeros(count * num_blocks, dtype=np.int64),
            num_blocks=np.full(count, num_blocks),
            block_copies=np.zeros((3, 0), dtype=np.int64),
            logits_rows=np.arange(count),
        )

    @property
    def positions(self) -> IntArray:
        """[T] absolute position of each token in its sequence. Computed anew each time."""
        return counts_up(self.first_positions, self.num_tokens)

    def blocks_of(self, sequences: IntArray, indices: IntArray) -> IntArray:
        """Block number `index` of the sequence's table, for each pair."""
        table_starts = np.cumsum(self.num_blocks) - self.num_blocks
        blocks: IntArray = self.block_ids[table_starts[sequences] + indices]
        return blocks

    @classmethod
    def of(cls, plan: StepPlan, *, with_logits: bool = True, before: StepPlan | None = None) -> "StepBatch":
        """A plan as arrays. Where they can be, they are views of the plan's own: they are not to be written to.

        `before` is the plan of the step before, where tokens of this one are pending.
        """
        parts, windows = _row_arrays(plan.decodes)
        prompt_rows = _NO_ROWS
        if plan.others:
            of_others, of_windows, prompt_rows = _share_arrays(plan.others, len(plan.decodes.token_ids))
            parts = tuple(map(np.concatenate, zip(parts, of_others, strict=True)))
            if of_windows[0]:
                windows = tuple(map(np.concatenate, zip(windows, of_windows, strict=True)))
        first_positions, num_tokens, num_draws, num_blocks, token_ids, block_ids, state_slots, num_drafts = parts
        num_window_blocks, window_block_ids = windows
        if before is not None and has_pending(plan):
            rows = np.frombuffer(drawing_rows(plan, before), np.int64)
            token_ids = np.where(rows == KNOWN, token_ids, -1 - rows)
        return cls(
            step_id=plan.step_id,
            token_ids=token_ids,
            first_positions=first_positions,
            num_tokens=num_tokens,
            num_draws=num_draws,
            block_ids=block_ids,
            num_blocks=num_blocks,
            block_copies=_copies(plan.block_copies) if plan.block_copies else _NO_COPIES,
            num_window_blocks=num_window_blocks,
            window_block_ids=window_block_ids,
            window_copies=_copies(plan.window_copies) if plan.window_copies else _NO_COPIES,
            logits_rows=_logits_rows(num_tokens, num_draws, len(token_ids), prompt_rows),
            state_slots=state_slots,
            num_drafts=num_drafts,
            state_copies=_state_copies(plan) if plan.state_copies else _NO_STATE_COPIES,
            idle_blocks=np.array(plan.idle_blocks, dtype=np.int64) if plan.idle_blocks else _NO_ROWS,
            idle_slots=np.array(plan.idle_slots, dtype=np.int64) if plan.idle_slots else _NO_ROWS,
            adapter_slots=_adapter_slots(plan) if plan.has_adapters else _NO_ROWS,
            pooled_rows=_pooled_rows(plan) if plan.pools else _NO_ROWS,
            second_starts=_second_starts(plan) if plan.has_pairs else _NO_ROWS,
            with_logits=with_logits,
            with_masses=with_logits and plan.asks_for_logprobs,
            num_steps=plan.num_steps,
        )

    def packed(self) -> IntArray:
        """The array that `unpack` reads. Its first word is at least 1: other messages may begin with 0 or less."""
        prompt_rows = self.logits_rows[self.num_draws.sum() :]
        header = (
            len(self.num_tokens),
            len(self.token_ids),
            len(self.block_ids),
            self.block_copies.shape[1],
            len(prompt_rows),
            len(self.state_slots),
            self.state_copies.shape[1],
            len(self.num_window_blocks),
            len(self.window_block_ids),
            self.window_copies.shape[1],
            len(self.adapter_slots),
            len(self.idle_blocks),
            len(self.idle_slots),
            len(self.pooled_rows),
            len(self.second_starts),
            self.step_id,
            self.with_logits,
            self.with_masses,
            self.num_steps,
        )
        of_sequences = (self.first_positions, self.num_tokens, self.num_draws, self.num_blocks)
        states = (self.state_slots, self.num_drafts, self.state_copies.ravel())
        windows = (self.num_window_blocks, self.window_block_ids, self.window_copies.ravel())
        rest = (self.token_ids, self.block_ids, self.block_copies.ravel(), prompt_rows, *states, *windows)
        last = (self.adapter_slots, self.idle_blocks, self.idle_slots, self.pooled_rows, self.second_starts)
        return np.concatenate((np.array(header, dtype=np.int64), *of_sequences, *rest, *last))

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, which is drawn from."""
        rows = self.logits_rows
        return len(self.num_tokens) == len(self.token_ids) == len(rows) and bool((rows == np.arange(len(rows))).all())

    @property
    def has_pending(self) -> bool:
        """Whether to insert a token."""
        return bool((self.token_ids < 0).any())

    @classmethod
    def unpack(cls, packed: IntArray) -> "StepBatch":
        """The step that was packed. Its fields are views of `packed` where they can be."""
        header = packed[:_HEADER_WORDS].tolist()
        num_sequences, total_tokens, total_blocks, num_copies, num_prompt_rows, num_slots, num_states, *rest = header
        num_windows, total_window_blocks, num_window_copies, num_adapter_slots, *rest = rest
        num_idle_blocks, num_idle_slots, num_pooled, num_seconds, step_id, *flags, num_steps = rest
        with_logits, with_masses = flags
        sizes = [num_sequences] * 4 + [total_tokens, total_blocks, 3 * num_copies, num_prompt_rows]
        sizes += [num_slots, num_slots, 2 * num_states, num_windows, total_window_blocks, 3 * num_window_copies]
        sizes += [num_adapter_slots, num_idle_blocks, num_idle_slots, num_pooled, num_seconds]
        parts, start = [], _HEADER_WORDS
        for size in sizes:
            parts.append(packed[start : start + size])
            start += size
        first_positions, num_tokens, num_draws, num_blocks, token_ids, block_ids, copies, prompt_rows, *states = parts
        state_slots, num_drafts, state_copies, num_window_blocks, window_block_ids, window_copies, *last = states
        adapter_slots, idle_blocks, idle_slots, pooled_rows, second_starts = last
        return cls(
            step_id=step_id,
            token_ids=token_ids,
            first_positions=first_positions,
            num_tokens=num_tokens,
            num_draws=num_draws,
            block_ids=block_ids,
            num_blocks=num_blocks,
            block_copies=copies.reshape(3, num_copies),
            logits_rows=_logits_rows(num_tokens, num_draws, total_tokens, prompt_rows),
            state_slots=state_slots,
            num_drafts=num_drafts,
            state_copies=state_copies.reshape(2, num_states),
            num_window_blocks=num_window_blocks,
            window_block_ids=window_block_ids,
            window_copies=window_copies.reshape(3, num_window_copies),
            idle_blocks=idle_blocks,
            idle_slots=idle_slots,
            adapter_slots=adapter_slots,
            pooled_rows=pooled_rows,
            second_starts=second_starts,
            with_logits=with_logits != 0,
            with_masses=with_masses != 0,
            num_steps=num_steps,
        )


def counts_up(firsts: IntArray, lengths: IntArray) -> IntArray:
    """The numbers first, first + 1, ... (`length` of them) for each pair, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(firsts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _logits_rows(num_tokens: IntArray, num_draws: IntArray, total_tokens: int, prompt_rows: IntArray) -> IntArray:
    if len(num_tokens) == total_tokens:  # one each
        drawn_rows = num_draws.nonzero()[0]
    else:
        drawn_rows = counts_up(num_tokens.cumsum() - num_draws, num_draws)
    return np.concatenate((drawn_rows, prompt_rows)) if len(prompt_rows) else drawn_rows


def _row_arrays(rows: DecodeRows) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
    """First positions, token counts, draw counts, block counts, tokens, blocks, state slots and draft counts of decode
    rows; and block counts and blocks of layers with a window.
    """
    columns, blocks = rows.columns, rows.blocks
    num_window_blocks = window_block_ids = _NO_ROWS
    if rows.window_blocks is not None:
        num_window_blocks = np.frombuffer(rows.window_blocks.num_blocks, np.int64)
        window_block_ids = np.frombuffer(rows.window_blocks.packed, np.int64)
    ones = np.frombuffer(columns.ones, np.int64)
    parts = (
        np.frombuffer(columns.first_positions, np.int64) + rows.age,
        ones,
        ones,
        np.frombuffer(blocks.num_blocks, np.int64),
        np.frombuffer(rows.token_ids, np.int64),
        np.frombuffer(blocks.packed, np.int64),
        np.frombuffer(columns.state_slots, np.int64),
        np.zeros(len(columns.state_slots), dtype=np.int64),
    )
    return parts, (num_window_blocks, window_block_ids)


def _share_arrays(
    shares: Sequence[ScheduledSequence], first_row: int
) -> tuple[tuple["array[int]", ...], tuple["array[int]", ...], IntArray]:
    """The same of single shares; and the rows, among all of the step, that tell prompt logprobs. `first_row` is the
    first of these shares.
    """
    first_positions, num_tokens, num_draws, num_blocks = array("q"), array("q"), array("q"), array("q")
    token_ids, block_ids, prompt_rows = array("q"), array("q"), array("q")
    state_slots, num_drafts, num_window_blocks, window_block_ids = array("q"), array("q"), array("q"), array("q")
    for share in shares:
        first_positions.append(share.first_position)
        num_tokens.append(len(share.token_ids))
        num_draws.append(share.num_draws)
        num_blocks.append(len(share.block_ids))
        if (prompt := share.prompt_logprobs) is not None:
            start = first_row + len(token_ids) + prompt.first_row
            prompt_rows.extend(range(start, start + len(prompt.token_ids)))
        token_ids.extend(share.token_ids)
        block_ids.extend(share.block_ids)
        if share.state_slot is not None:
            state_slots.append(share.state_slot)
            num_drafts.append(share.num_drafts)
        if share.window_block_ids:
            num_window_blocks.append(len(share.window_block_ids))
            window_block_ids.extend(share.window_block_ids)
    columns = (first_positions, num_tokens, num_draws, num_blocks, token_ids, block_ids, state_slots, num_drafts)
    return columns, (num_window_blocks, window_block_ids), np.frombuffer(prompt_rows, np.int64)


def _copies(copies: Sequence[BlockCopy]) -> IntArray:
    fields = ([copy.source for copy in copies], [c.destination for c in copies], [c.num_tokens for c in copies])
    return np.array(fields, dtype=np.int64)


def _state_copies(plan: StepPlan) -> IntArray:
    return np.array(plan.state_copies, dtype=np.int64).T


def _adapter_slots(plan: StepPlan) -> IntArray:
    of_rows = plan.decodes.columns.adapter_slots or [0] * len(plan.decodes)
    return np.array([*of_rows, *(share.adapter_slot for share in plan.others)], dtype=np.int64)


def _second_starts(plan: StepPlan) -> IntArray:
    of_rows = [0] * len(plan.decodes)
    return np.array([*of_rows, *(share.second_start for share in plan.others)], dtype=np.int64)


def _pooled_rows(plan: StepPlan) -> IntArray:
    first, rows = len(plan.decodes.token_ids), array("q")
    for share in plan.others:
        if share.pool is not None:
            rows.extend(range(first + share.pool.first_row, first + share.pool.end_row))
        first += len(share.token_ids)
    return np.frombuffer(rows, np.int64)
