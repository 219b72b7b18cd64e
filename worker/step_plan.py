"""Step plans and step results: the contract between the scheduler and the model runner.

A plan lists the tokens of each sequence that one step computes, and their blocks; a result holds the sampled tokens.
Neither is changed once made, and both are plain integers, since plans go to other processes. Objects made for every
sequence of every step are dataclasses that are not frozen: a frozen one takes six times as long to make.

Most work of a busy engine is decode rows: sequences that compute one token and sample one, as columns. From one
step to the next each row is one position further. So the columns are made when a sequence joins or leaves, and a step
advances all of them by one number.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Final, Protocol

from holdfast.worker.draws import DrawParams, draw_after
from holdfast.worker.pooling import PoolShare
from holdfast.worker.request import TokenLogprob


class DecodeColumns:
    """Columns that stay the same while the same sequences decode. Immutable."""

    __slots__ = (
        "adapter_slots",
        "ask_for_logprobs",
        "draws",
        "first_output_indices",
        "first_positions",
        "need_logits",
        "num_context_tokens",
        "ones",
        "sequence_ids",
        "state_slots",
    )

    def __init__(
        self,
        sequence_ids: Sequence[int],
        first_positions: Sequence[int],
        first_output_indices: Sequence[int],
        draws: Sequence[DrawParams],
        state_slots: Sequence[int] = (),
        adapter_slots: Sequence[int] = (),
    ) -> None:
        self.sequence_ids = sequence_ids
        self.first_positions = array("q", first_positions)
        """First positions at age 0."""
        self.first_output_indices = first_output_indices
        """First output indices at age 0."""
        self.draws = draws
        """Draws at any output position; all of them without logits settings."""
        self.state_slots = array("q", state_slots)
        """Slot of each row's state; empty for a model that keeps none."""
        self.adapter_slots = array("q", adapter_slots if any(adapter_slots) else ())
        """Slot of each row's adapter, 0 for none; empty where no row has one."""
        self.need_logits = self.ask_for_logprobs = False
        """Whether some draw takes more than the argmax of its row, and whether some draw reports log-probabilities."""
        for draw in draws:
            self.need_logits = self.need_logits or draw.needs_logits
            self.ask_for_logprobs = self.ask_for_logprobs or draw.sampling.logprobs is not None
        self.ones = array("q", (1,)) * len(first_positions)
        """Number of tokens that each row computes, and draws."""
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

    __slots__ = ("age", "blocks", "columns", "num_context_tokens", "num_steps", "token_ids", "window_blocks")

    def __init__(
        self,
        columns: DecodeColumns,
        age: int,
        token_ids: Sequence[int],
        blocks: BlockTables,
        num_steps: int = 1,
        window_blocks: BlockTables | None = None,
    ) -> None:
        self.columns = columns
        self.age = age
        """Steps since the columns were made."""
        self.token_ids = array("q", token_ids)
        self.blocks = blocks
        self.window_blocks = window_blocks
        """Blocks of window layers, if they have separate blocks."""
        self.num_context_tokens = columns.num_context_tokens + age * len(self.token_ids)
        """Position + 1, summed over the rows: the tokens that they attend to."""
        self.num_steps = num_steps
        """Steps to be run one after the other, each with the tokens that the one before it drew. More than one only if
        all rows take the argmax and the plan has no other sequences.
        """

    def __len__(self) -> int:
        return len(self.token_ids)

    def draws(self) -> list[DrawParams]:
        """The draw of each row."""
        columns, age = self.columns, self.age
        return [draw.at(index + age) for draw, index in zip(columns.draws, columns.first_output_indices, strict=True)]


NO_ROWS: Final = DecodeRows(DecodeColumns((), (), (), ()), 0, (), BlockTables((), ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobParams:
    """The prompt tokens whose logprobs a step reports. Each is read off the logits row of the token before it."""

    first_row: int
    """The first such row among the sequence's rows in the step; the others follow without a gap."""
    token_ids: tuple[int, ...]
    """The tokens whose logprobs are reported. The last one may belong to the next step."""
    num_logprobs: int
    """Best tokens to report with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """The first `num_tokens` slots of a block are copied to another one, whose other slots become zeros."""

    source: int
    destination: int
    num_tokens: int


StateCopy = tuple[int, int]
"""Source and destination slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Work of the draft model for a sequence before the step: it reads `token_ids`, at positions `first_position`, + 1,
    + 2, ..., up to the last that the step computes without drafts, and then guesses ahead.
    """

    first_position: int
    token_ids: tuple[int, ...]
    num_drafts: int
    """Tokens to guess; 0: only to keep up."""


@dataclass(slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's share of a step: `token_ids` are run at absolute positions `first_position`, + 1, + 2, ..."""

    sequence_id: int
    """Unique in the life of an engine; survives preemption."""
    first_position: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    """Blocks of positions 0 to `first_position + len(token_ids) - 1`, in order; with `drafting`, of its drafts too."""
    window_block_ids: tuple[int, ...] = ()
    """The same of window layers, if they have separate blocks. Blocks that no token of the step sees may be any blocks.
    """
    draw: DrawParams | None
    """None for a chunk of the prompt that is not the last: nothing is drawn."""
    num_draws: int = 0
    """Number of last rows that are drawn from: 1 when `draw` is set; more when drafted tokens are verified."""
    state_slot: int | None = None
    """Slot of the sequence's state, for a model that keeps states."""
    adapter_slot: int = 0
    """Slot of the sequence's adapter; 0 without an adapter."""
    num_drafts: int = 0
    """Number of last tokens that are drafts."""
    prompt_logprobs: PromptLogprobParams | None = None
    """None where no logprobs of prompt tokens are asked for, which is nearly always."""
    second_start: int = 0
    """Position of the first token of the second of two texts; 0: there is one text."""
    pool: PoolShare | None = None
    """Rows whose states are pooled, of a request for those; it draws nothing."""
    drafting: Drafting | None = None
    """Work for the draft model, where there is one. The step then verifies its guesses (`with_drafts`)."""

    def with_drafts(self, drafts: tuple[int, ...]) -> "ScheduledSequence":
        """This share with these tokens, guessed to follow, to be verified."""
        num_draws, num_drafts = self.num_draws + len(drafts), self.num_drafts + len(drafts)
        return replace(self, token_ids=self.token_ids + drafts, num_draws=num_draws, num_drafts=num_drafts)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The sequences that one step computes, and the block copies before it. Never empty."""

    step_id: int
    decodes: DecodeRows = NO_ROWS
    """The first sequences: the ones that are planned as rows."""
    others: Sequence[ScheduledSequence] = ()
    """All other sequences."""
    block_copies: tuple[BlockCopy, ...] = ()
    """Copies made before anything is computed, on every rank. A block may be the source of several, and also a
    destination: all sources are read before any destination is written."""
    window_copies: tuple[BlockCopy, ...] = ()
    """The same, in window layers with separate blocks."""
    state_copies: tuple[StateCopy, ...] = ()
    """Copies made before anything is computed, on every rank, one after the other in this order."""
    idle_blocks: tuple[int, ...] = ()
    """Blocks, ascending, that hold nothing once the copies are made: their memory is given back, for slots."""
    idle_slots: tuple[int, ...] = ()
    """Likewise slots, for blocks."""
    num_steps: int = field(init=False)
    """Steps that are run on this plan: more than 1 only for decodes while no request waits (`DecodeRows.num_steps`)."""
    num_tokens: int = field(init=False)
    """Computed, in all its steps."""
    needs_logits: bool = field(init=False)
    """Whether its result depends on more than the argmax of its rows."""
    asks_for_logprobs: bool = field(init=False)
    """Whether it reports log-probabilities of some token."""
    has_grammars: bool = field(init=False)
    """Some draw must match a grammar."""
    has_adapters: bool = field(init=False)
    """Some sequence has an adapter."""
    has_pairs: bool = field(init=False)
    """Some sequence has two texts."""
    pools: bool = field(init=False)
    """Some sequence is pooled."""

    def __post_init__(self) -> None:
        rows = self.decodes
        num_tokens = len(rows.token_ids) * rows.num_steps
        needs_logits, asks_for_logprobs, has_grammars = rows.columns.need_logits, rows.columns.ask_for_logprobs, False
        has_adapters, has_pairs, pools = bool(rows.columns.adapter_slots), False, False
        for share in self.others:
            num_tokens += len(share.token_ids)
            if share.adapter_slot:
                has_adapters = True
            if share.pool is not None:
                pools = True
            if share.second_start:
                has_pairs = True
            draw, settings = share.draw, None
            if draw is not None:
                settings = draw.logits_settings
                needs_logits = needs_logits or draw.needs_logits
            if share.prompt_logprobs is not None or (draw is not None and draw.sampling.logprobs is not None):
                needs_logits = asks_for_logprobs = True
            if settings is not None and settings.grammar:
                has_grammars = True
        self.num_steps, self.num_tokens = rows.num_steps, num_tokens
        self.needs_logits, self.asks_for_logprobs, self.has_grammars = needs_logits, asks_for_logprobs, has_grammars
        self.has_adapters, self.has_pairs, self.pools = has_adapters, has_pairs, pools

    @property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        """All of them, in order, each as a separate share. Made at each call: code that runs at every step reads
        `decodes` and `others`.
        """
        return (*_shares(self.decodes), *self.others)

    def with_drafts(self, drafts: Sequence[tuple[int, ...]]) -> "StepPlan":
        """The plan that is run once the draft model has guessed: `drafts` are for each sequence, or empty where it has
        not.
        """
        if not any(drafts):
            return self
        pairs = zip(self.sequences, drafts, strict=True)
        return replace(self, decodes=NO_ROWS, others=tuple(share.with_drafts(guessed) for share, guessed in pairs))


def _shares(rows: DecodeRows) -> list[ScheduledSequence]:
    """The rows of a step, each as a separate share."""
    columns, age = rows.columns, rows.age
    window_tables = repeat(()) if rows.window_blocks is None else rows.window_blocks.tables
    return [
        ScheduledSequence(
            sequence_id=sequence_id,
            first_position=first_position + age,
            token_ids=(token_id,),
            block_ids=block_ids,
            window_block_ids=window_block_ids,
            draw=draw,
            num_draws=1,
            state_slot=columns.state_slots[row] if columns.state_slots else None,
            adapter_slot=columns.adapter_slots[row] if columns.adapter_slots else 0,
        )
        for row, (sequence_id, first_position, token_id, block_ids, window_block_ids, draw) in enumerate(
            zip(
                columns.sequence_ids,
                columns.first_positions,
                rows.token_ids,
                rows.blocks.tables,
                window_tables,
                rows.draws(),
                strict=False,
            )
        )
    ]


def draws_of(plan: StepPlan) -> list[DrawParams]:
    """The draws of a plan, one for each of its logits rows, in order."""
    draws = plan.decodes.draws()
    for sequence in plan.others:
        if sequence.draw is not None and sequence.num_draws > 0:
            draws.append(sequence.draw)
            drafts = sequence.token_ids[len(sequence.token_ids) - sequence.num_draws + 1 :]
            draws += [draw_after(sequence.draw, drafts[: index + 1]) for index in range(len(drafts))]
    return draws


def plain_draws_of(plan: StepPlan) -> list[DrawParams] | None:
    """`draws_of` a plan that decodes, if they only draw: without logits processors and log-probabilities."""
    columns = plan.decodes.columns
    if plan.others and any(sequence.prompt_logprobs is not None for sequence in plan.others):
        return None
    draws = None if columns.ask_for_logprobs else draws_of(plan)
    if draws is None or any(draw.logits_settings is not None or draw.sampling.logprobs is not None for draw in draws):
        return None
    return draws


NO_TOKEN: Final = -1
"""Value in place of a drawn token where the logits are NaN or infinite."""

DEAD_END: Final = -2
"""Value in place of a drawn token where the grammar of the output allows none, or can be followed no further."""

PENDING: Final = -1
"""Value in a plan in place of the token that the step before draws for the same sequence, because the plan was made
before that step's result. The runner of the plan puts the token in (`pending_tokens.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Draws of one step: for each sequence of the plan `with_drafts`, in its order, `num_draws` token ids; for each row
    of a plan of several steps, one for each step.
    """

    step_id: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Log-probabilities for each sequence, one for each of its tokens, or none if it asks for none. Empty if no
    sequence asks."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """Log-probabilities of the prompt for each sequence, one for each token of its `prompt_logprobs`. Empty if no
    sequence asks."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Guesses of the draft model for each sequence that the step verified. Empty if there were none."""
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    """Sums of pooled sequences so far, float64, or where they are complete their results, float32; by sequence id.
    `NOT_FINITE` in place of a value with NaN or infinity."""

    def without_first(self, count: int) -> "StepResult":
        """Draws of all sequences but the first `count`."""
        if count == 0:
            return self
        return replace(
            self,
            token_ids=self.token_ids[count:],
            logprobs=self.logprobs[count:],
            prompt_logprobs=self.prompt_logprobs[count:],
            drafts=self.drafts[count:],
        )


class StepRunner(Protocol):
    """Runner of plans: `LeaderRunner`, or a pseudo-model in tests."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def keep_alive(self) -> None:
        """Called while there is nothing to do, so that followers see a living leader."""

    def close(self) -> None: ...


def confirmed(token_ids: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[int, ...]:
    """The sampled tokens that follow accepted drafts.

    Draw i is made from the i-th of the last `len(drawn)` rows. The first of these rows is a token of the sequence, the
    others are drafts: draw i is the model's token only if draft i equals draw i - 1, and so on back to the first.
    """
    drafts = token_ids[len(token_ids) - len(drawn) + 1 :]
    num_right = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))
    return drawn[: num_right + 1]
