"""Start-up self-check of a loaded model: a token's logits must depend on its own sequence alone.

Nine short random sequences are run alone, packed together, in chunks and token by token; those of an encoder, whose
tokens see all of their sequence, alone and packed in two orders. If that changes the numbers,
the model mixes tokens outside attention and is refused. If it changes only the last bits, the model serves, but a
replay may differ from the first run.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Final

import numpy as np

from holdfast.worker.draws import DrawParams
from holdfast.worker.engine.rank_orders import number_message
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.models.checks import OTHER_ENGINE
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

NUM_TOKENS: Final = (70, 23, 6, 5, 4, 3, 3, 2, 2)
"""Tokens of each sequence. The first exceeds a block, a row tile and a tile of keys; all decode together, 9 rows and
fewer."""

_CHUNKS: Final = (1, 3, 7, 1, 3, 7)  # tokens of each prefill chunk
_NUM_DECODES: Final = 4

_TOLERANCE: Final = {"float32": 1e-3}
_HALF_TOLERANCE: Final = 5e-2
"""Tolerance relative to the largest logit. Half types round differently with the number of rows where rows are not
invariant."""

_GREEDY: Final = DrawParams(SamplingParams(seed=0, temperature=0.0), 0)

Spans = Sequence[tuple[int, int, int]]
"""Spans of one step: the number of each sequence in it, its first position and number of tokens."""


class Outcome(IntEnum):
    """The result of the self-check, as the leader broadcasts it."""

    REFUSED = 0
    BITS_DIFFER = 1
    BITS_EQUAL = 2


class SelfCheck:
    """Runs the check. `run` gives the logits of all rows of a plan, float32 [tokens, vocab], in separate memory.

    They are compared by numpy, on one thread: torch's wait for each other, busily, after every operation.
    """

    def __init__(self, info: ModelInfo, run: Callable[[StepPlan], np.ndarray], seed: int = 0) -> None:
        self._info = info
        self._run = run
        generator = np.random.default_rng(seed)
        self._tokens: list[list[int]] = []
        self._blocks: list[tuple[int, ...]] = []
        self._window_blocks: list[tuple[int, ...]] = []
        # The first blocks, since memory is prefaulted up to the last one that was used; descending, as tables may be.
        most = sum(self._num_blocks(want) + self._num_window_blocks(want) for want in self._wanted())
        ids = iter(range(min(most, info.num_blocks) - 1, -1, -1))
        free = info.num_blocks
        for want in self._wanted():
            if length := self._longest(want, free):
                self._tokens.append(generator.integers(info.vocab_size, size=length).tolist())
                self._blocks.append(tuple(islice(ids, self._num_blocks(length))))
                self._window_blocks.append(tuple(islice(ids, self._num_window_blocks(length))))
                free -= self._num_blocks(length) + self._num_window_blocks(length)
        self._alone: list[np.ndarray] = []
        self._largest: list[float] = []

    def _wanted(self) -> tuple[int, ...]:
        """Lengths of the sequences. Few blocks, or few slots of state, leave room for fewer sequences."""
        first = self._longest(NUM_TOKENS[0], max(1, self._info.num_blocks // 2))
        return (first, *NUM_TOKENS[1:])[: self._info.num_state_slots or None]

    @property
    def block_ids(self) -> list[int]:
        """The blocks that the check writes to."""
        return [block for blocks in (*self._blocks, *self._window_blocks) for block in blocks]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._info.block_size)

    def _num_window_blocks(self, num_tokens: int) -> int:
        window = self._info.window
        return 0 if window is None else window.num_blocks_for(num_tokens)

    def _longest(self, num_tokens: int, num_blocks: int) -> int:
        """Tokens of a sequence, at most `num_tokens`, that these blocks hold without giving any back."""
        lengths = range(min(num_tokens, self._info.max_model_len), 0, -1)
        fits = (n for n in lengths if self._num_blocks(n) + self._num_window_blocks(n) <= num_blocks)
        return next(fits, 0)

    def passes_bitwise(self) -> bool:
        """Whether every row has the same bits whatever else is in its step.

        Raises `UnsupportedModelError` where other tokens of the step change the numbers, or where they are not finite.
        """
        alone: list[Spans] = [[(number, 0, len(tokens))] for number, tokens in enumerate(self._tokens)]
        self._alone = [rows for _, _, rows in self._rows(alone)]
        self._largest = [float(np.abs(rows).max()) for rows in self._alone]
        if not np.isfinite(self._largest).all():
            reason = f"its logits are not finite in {self._info.dtype}"
            raise UnsupportedModelError(self._info.model_type, reason, "Choose another dtype, or check its weights")
        if not all(self._largest):
            reason = f"its logits are all 0 in {self._info.dtype}"
            way_out = "Choose another dtype if its numbers overflow, or check its weights"
            raise UnsupportedModelError(self._info.model_type, reason, way_out)
        packed: list[Spans] = [[span for spans in alone for span in spans]]
        others = [[packed[0][::-1]]] if self._info.computes_whole_prompts else [self._chunked(), self._decoded()]
        outcomes = [self._compare(steps) for steps in (packed, *others)]
        drift = float(np.quantile([one for _, drifts in outcomes for one in drifts], 0.5, method="lower"))
        if not drift <= _TOLERANCE.get(self._info.dtype, _HALF_TOLERANCE):
            reason = f"it mixes tokens outside attention (logits moved by {drift:.1%} with the batch)"
            raise UnsupportedModelError(self._info.model_type, reason, OTHER_ENGINE)
        return all(equal for equal, _ in outcomes)

    def _chunked(self) -> list[Spans]:
        """The first sequence in chunks."""
        steps: list[Spans] = []
        start, length = 0, len(self._tokens[0])
        for size in (*_CHUNKS, length):
            count = min(size, length - start)
            if count > 0:
                steps.append([(0, start, count)])
            start += count
        return steps

    def _decoded(self) -> list[Spans]:
        """All sequences but for their last tokens, the last sequence first; then those tokens one by one, together."""
        starts = {number: max(1, len(tokens) - _NUM_DECODES) for number, tokens in enumerate(self._tokens)}
        order = sorted(starts, reverse=True)
        steps: list[Spans] = [[(number, 0, starts[number]) for number in order]]
        for i in range(_NUM_DECODES):
            under_way = [number for number in order if starts[number] + i < len(self._tokens[number])]
            steps.append([(number, starts[number] + i, 1) for number in under_way])
        return [spans for spans in steps if spans]

    def _compare(self, steps: Sequence[Spans]) -> tuple[bool, list[float]]:
        """Whether all rows are equal to those alone, and how far off the first rows of spans are.

        State that does not live in the cache shows there first. Half of them off is no accident; one of them may be,
        where rounding sends a token to another expert.
        """
        equal, drifts = True, list[float]()
        for number, start, rows in self._rows(steps):
            alone = self._alone[number]
            drifts.append(float(np.abs(rows[0] - alone[start]).max()) / self._largest[number])
            equal = equal and np.array_equal(rows, alone[start : start + len(rows)])
        return equal, drifts

    def _rows(self, steps: Sequence[Spans]) -> Iterator[tuple[int, int, np.ndarray]]:
        """The logits of each span, one step after the other: with a large vocabulary all of them are many megabytes."""
        for step_id, spans in enumerate(steps):
            plan = StepPlan(step_id=step_id, others=tuple(self._scheduled(*span) for span in spans))
            logits = np.split(self._run(plan), np.cumsum([count for _, _, count in spans])[:-1])
            for (number, start, _), part in zip(spans, logits, strict=True):
                yield number, start, part

    def _scheduled(self, number: int, start: int, count: int) -> ScheduledSequence:
        end = start + count
        return ScheduledSequence(
            sequence_id=number,
            first_position=start,
            token_ids=tuple(self._tokens[number][start : start + count]),
            block_ids=tuple(self._blocks[number][: self._num_blocks(end)]),
            window_block_ids=tuple(self._window_blocks[number][: self._num_window_blocks(end)]),
            draw=_GREEDY,
            num_draws=count,
            state_slot=number if self._info.num_state_slots else None,
        )


def lead_check(check: SelfCheck, release: Callable[[], None], group: TensorParallelGroup) -> Outcome:
    """Runs the check, releases the other ranks from running its steps, and sends them its outcome."""
    outcome = Outcome.REFUSED
    try:
        outcome = Outcome.BITS_EQUAL if check.passes_bitwise() else Outcome.BITS_DIFFER
    finally:
        release()
        group.broadcast(number_message(outcome))
    return outcome
