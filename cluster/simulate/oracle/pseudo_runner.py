"""Step runner of the simulator's pseudo-model, with a real leader's state: blocks, and grammar matchers.

The keys and values are the tokens themselves, in real blocks, and the whole prefix is read back from them before each
draw. So a block that is used twice, freed too early or listed in the wrong order changes the output. A model that keeps
states has a digest of its tokens in slots beside them: where it is not that of the prefix, it shows. Everything else
comes from the plan, as in `worker/engine/model_runner.py`. `PROPOSERS` are draft proposers of such a replica: the real
n-gram lookup, a proposer that is nearly always right, and one that is never right.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple
from zlib import crc32

from holdfast.cluster.simulate.oracle.oracle import right_token
from holdfast.cluster.simulate.oracle.pseudo_model import (
    EOS_TOKEN_ID,
    NUM_POISON_STEPS,
    POISON_TOKEN_ID,
    VOCAB_SIZE,
    PoisonedError,
    PseudoMatcher,
    drawn_token,
    token_logprob,
)
from holdfast.worker.draws import DrawParams
from holdfast.worker.grammar_matchers import GrammarMatchers
from holdfast.worker.model_info import Window
from holdfast.worker.request import TokenLogprob
from holdfast.worker.scheduler import sequence as scheduled
from holdfast.worker.scheduler.drafters import NgramProposer
from holdfast.worker.scheduler.speculation import Proposer
from holdfast.worker.step_plan import (
    BlockCopy,
    DecodeRows,
    ScheduledSequence,
    StateCopy,
    StepPlan,
    StepResult,
    draws_of,
)

_LOST: Final = 0x10570000
"""Value of a state that is lost."""


class _State(NamedTuple):
    position: int
    digest: int
    drafts: tuple[int, ...]


class PseudoStates:
    """The slots of one replica."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [_State(-1, _LOST, ())] * num_slots
        """Content of each slot."""

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """One after the other, in this order."""
        for source, destination in copies:
            self.slots[destination] = self.slots[source]

    def advance(self, share: ScheduledSequence) -> int:
        """Takes the tokens of a share in; the digest behind the last of them, drafts included."""
        assert share.state_slot is not None, "each sequence of a step has a slot"
        num_certain = len(share.token_ids) - share.num_drafts
        digest = digest_of(share.token_ids[:num_certain], self._before(share.state_slot, share.first_position))
        drafts = share.token_ids[num_certain:]
        self.slots[share.state_slot] = _State(share.first_position + num_certain, digest, drafts)
        return digest_of(drafts, digest)

    def _before(self, slot: int, position: int) -> int:
        """The digest at a position: behind the last certain token, or any draft after it."""
        if position == 0:
            return 0
        state = self.slots[slot]
        num_right = position - state.position
        if not 0 <= num_right <= len(state.drafts):
            return _LOST
        return digest_of(state.drafts[:num_right], state.digest)


def digest_of(token_ids: Sequence[int], before: int = 0) -> int:
    """The digest behind these tokens, from the one before them."""
    return crc32(bytes(token_ids), before)


_EMPTY: Final = b"\xff"
"""Content of slots that were never written: no token."""

_WITHOUT_STATE: Final = b"\xfe"
"""Replaces the first token if a state, or the window's tokens, do not belong to the sequence: all later draws then
differ.
"""

Row = tuple[DrawParams, bytes | None]
"""A draw and the mask of its grammar."""


class PseudoRunner:
    """One replica's runner, from its start to its end."""

    def __init__(
        self, num_blocks: int, block_size: int, num_state_slots: int = 0, window: Window | None = None
    ) -> None:
        """`num_state_slots`: 0 for a model that keeps no states. `window`: of layers that see the last positions alone,
        and keep the tokens once more, in blocks of the same memory.
        """
        self._block_size = block_size
        self._window = window
        self._room = block_size if window is None else window.spacing
        self._slots = bytearray(_EMPTY * (num_blocks * self._room))
        self._states = PseudoStates(num_state_slots) if num_state_slots else None
        self._grammars = GrammarMatchers(PseudoMatcher, frozenset({EOS_TOKEN_ID}))

    def run(self, plan: StepPlan) -> StepResult:
        return run_each(plan, self._run_one)

    def read_block(self, kind: bytes, place: int) -> Any:
        """Content of a block (kind `k`) or a slot."""
        if kind == b"k":
            return bytes(self._slots[place * self._block_size : (place + 1) * self._block_size])
        assert self._states is not None, "the model keeps states"
        return self._states.slots[place]

    def write_block(self, kind: bytes, place: int, content: Any) -> None:
        """Overwrites a block or a slot with the values that `read_block` gave."""
        if kind == b"k":
            self._slots[place * self._block_size : (place + 1) * self._block_size] = content
        elif self._states is not None:
            self._states.slots[place] = content

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copies slots before the next step does."""
        if self._states is not None:
            self._states.copy(copies)

    def _run_one(self, plan: StepPlan) -> StepResult:
        sequences = plan.sequences
        self._copy(plan.block_copies, self._block_size)
        if self._states is not None:
            self._states.copy(plan.state_copies)
            self._give_back(self._states, plan)
        for sequence in sequences:
            self._write(sequence, sequence.block_ids, self._block_size)
        if self._window is not None:
            self._copy(plan.window_copies, self._window.block_size)
            for sequence in sequences:
                self._write(sequence, sequence.window_block_ids, self._window.block_size)
        masks = self._grammars.masks(plan) if plan.has_grammars else {}
        rows = ((params, masks.get(number)) for number, params in enumerate(draws_of(plan)))
        prefixes = [self._read_back(sequence) for sequence in sequences]
        if self._states is not None:
            prefixes = [self._with_state(self._states, *pair) for pair in zip(sequences, prefixes, strict=True)]
        pairs = list(zip(sequences, prefixes, strict=True))
        drawn = [_draw(sequence, prefix, rows) for sequence, prefix in pairs]
        logprobs = [_say(sequence, prefix, tokens) for (sequence, prefix), tokens in zip(pairs, drawn, strict=True)]
        of_prompts = [_prompt_logprobs(sequence, prefix) for sequence, prefix in pairs]
        return StepResult(
            step_id=plan.step_id,
            token_ids=tuple(drawn),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs=tuple(of_prompts) if any(of_prompts) else (),
        )

    def _copy(self, copies: Sequence[BlockCopy], size: int) -> None:
        """All sources are read before any destination is written."""
        starts = [copy.source * self._room for copy in copies]
        sources = [self._slots[start : start + copy.num_tokens] for start, copy in zip(starts, copies, strict=True)]
        for copy, tokens in zip(copies, sources, strict=True):
            start = copy.destination * self._room
            self._slots[start : start + size] = tokens.ljust(size, _EMPTY)

    def _give_back(self, states: PseudoStates, plan: StepPlan) -> None:
        """Memory that was given back holds nothing."""
        for block_id in plan.idle_blocks:
            self._slots[block_id * self._room : (block_id + 1) * self._room] = _EMPTY * self._room
        for slot in plan.idle_slots:
            states.slots[slot] = _State(-1, _LOST, ())

    def _write(self, sequence: ScheduledSequence, block_ids: Sequence[int], size: int) -> None:
        for position, token_id in enumerate(sequence.token_ids, sequence.first_position):
            self._slots[block_ids[position // size] * self._room + position % size] = token_id

    def _with_state(self, states: PseudoStates, sequence: ScheduledSequence, prefix: bytes) -> bytes:
        """The prefix, if the state is that of its tokens."""
        digest = states.advance(sequence)
        return prefix if not prefix or digest == digest_of(prefix) else _WITHOUT_STATE + prefix[1:]

    def _read_back(self, sequence: ScheduledSequence) -> bytes:
        """Tokens read back from the blocks, up to the last token of the step; empty if nothing is asked."""
        if sequence.draw is None and sequence.prompt_logprobs is None:
            return b""
        prefix = self._content(sequence.block_ids, self._block_size, sequence)
        if self._window is not None:
            seen = self._content(sequence.window_block_ids, self._window.block_size, sequence)
            first = self._window.first_block(sequence.first_position) * self._window.block_size
            if seen[first:] != prefix[first:]:
                return _WITHOUT_STATE + prefix[1:]
        return prefix

    def _content(self, block_ids: Sequence[int], size: int, sequence: ScheduledSequence) -> bytes:
        starts = (block_id * self._room for block_id in block_ids)
        blocks = [self._slots[start : start + size] for start in starts]
        return bytes(b"".join(blocks)[: sequence.first_position + len(sequence.token_ids)])


def _draw(sequence: ScheduledSequence, prefix: bytes, rows: Iterator[Row]) -> tuple[int, ...]:
    """A sequence's draws, the next of `rows`: each after one token more."""
    draw = sequence.draw
    if draw is None:
        return ()
    if prefix[0] == POISON_TOKEN_ID and draw.first_output_index >= draw.seed % NUM_POISON_STEPS:
        raise PoisonedError
    first = len(prefix) - sequence.num_draws + 1
    own = islice(rows, sequence.num_draws)
    return tuple(drawn_token(prefix[:end], params, mask) for end, (params, mask) in enumerate(own, first))


def _say(sequence: ScheduledSequence, prefix: bytes, drawn: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """Reported log-probabilities of the drawn tokens."""
    if sequence.draw is None or (count := sequence.draw.num_logprobs) is None:
        return ()
    first = len(prefix) - len(drawn) + 1
    chosen = sequence.draw.sampling.logprob_token_ids
    return tuple(token_logprob(prefix[:end], token_id, count, chosen) for end, token_id in enumerate(drawn, first))


def _prompt_logprobs(sequence: ScheduledSequence, prefix: bytes) -> tuple[TokenLogprob, ...]:
    """Reported log-probabilities of prompt tokens."""
    params = sequence.prompt_logprobs
    if params is None:
        return ()
    first = sequence.first_position + params.first_row + 1
    return tuple(
        token_logprob(prefix[:end], token_id, params.num_logprobs)
        for end, token_id in enumerate(params.token_ids, first)
    )


def run_each(plan: StepPlan, run: Callable[[StepPlan], StepResult]) -> StepResult:
    """Results of a plan's steps, run one after the other, each with the tokens of the one before. `run` runs plans of
    one step.
    """
    if plan.num_steps == 1:
        return run(plan)
    rows, drawn = plan.decodes, []
    token_ids = list(rows.token_ids)
    for number in range(plan.num_steps):
        single = DecodeRows(rows.columns, rows.age + number, token_ids, rows.blocks, 1, rows.window_blocks)
        step = replace(plan, decodes=single)
        if number:
            step = replace(step, block_copies=(), window_copies=(), state_copies=(), idle_blocks=(), idle_slots=())
        result = run(step)
        token_ids = [token_id for (token_id,) in result.token_ids]
        drawn.append(token_ids)
    return StepResult(step_id=plan.step_id, token_ids=tuple(zip(*drawn, strict=True)))


class InformedProposer:
    """Proposes the token that the model will sample. Every `errs_every`th guess is wrong, by one."""

    def __init__(self, errs_every: int) -> None:
        self._errs_every = errs_every
        self._num_guesses = 0

    def propose(self, sequence: scheduled.Sequence, num_tokens: int) -> tuple[int, ...]:
        """The tokens that the model draws next, with planted errors."""
        output = bytes(sequence.token_ids[sequence.num_prompt_tokens :])
        guesses: list[int] = []
        for _ in range(num_tokens):
            token_id = right_token(sequence.request, output)
            self._num_guesses += 1
            if self._num_guesses % self._errs_every == 0:
                token_id = (token_id + 1) % VOCAB_SIZE
            guesses.append(token_id)
            output += bytes((token_id,))
        return tuple(guesses)

    def forget(self, sequence: scheduled.Sequence) -> None:
        """Does nothing: the proposer keeps no state of a sequence."""


PROPOSERS: Final[dict[str, Callable[[], Proposer]]] = {
    "lookup": lambda: NgramProposer(1, 3),
    "right": lambda: InformedProposer(errs_every=7),
    "wrong": lambda: InformedProposer(errs_every=1),
}
"""Makers of proposers by name; each call makes one without memory."""
