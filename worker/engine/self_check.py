"""Start-up self-check of a loaded model: a token's logits must depend on its own sequence alone.

Two short random sequences are run alone, packed together, in chunks and token by token. If that changes the numbers,
the model mixes tokens outside attention and is refused. If it changes only the last bits, the model serves, but a
replay may differ from the first run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.models.checks import OTHER_ENGINE
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

NUM_TOKENS: Final = (70, 23)
"""Of the two sequences: over a block, a row tile and a tile of keys; short enough to cost next to nothing."""

_CHUNKS: Final = (1, 3, 7, 1, 3, 7)
_NUM_DECODES: Final = 4

_TOLERANCE: Final = {"float32": 1e-3}
_HALF_TOLERANCE: Final = 5e-2
"""Of the largest logit. Half types round differently with the number of rows where rows are not invariant."""

_GREEDY: Final = DrawParams(SamplingParams(seed=0, temperature=0.0), 0)

Spans = Sequence[tuple[int, int, int]]
"""What one step runs: for each sequence in it its number, first position and number of tokens."""


class SelfCheck:
    """Runs the check. `run` gives the logits of all rows of a plan, [tokens, vocab]."""

    def __init__(self, info: ModelInfo, run: Callable[[StepPlan], Tensor], seed: int = 0) -> None:
        self._info = info
        self._run = run
        first = min(info.num_blocks // 2, -(-NUM_TOKENS[0] // info.block_size))  # low ids: only used blocks take memory
        rooms = [first * info.block_size, (info.num_blocks - first) * info.block_size]
        lengths = [min(want, info.max_model_len, room) for want, room in zip(NUM_TOKENS, rooms, strict=True)]
        generator = torch.Generator().manual_seed(seed)
        self._tokens = [torch.randint(info.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        self._blocks = [range(first - 1, -1, -1), range(first, info.num_blocks)]
        self._alone: list[Tensor] = []
        self._largest: list[Tensor] = []

    @property
    def block_ids(self) -> Tensor:
        """The blocks that the check writes to, int64."""
        used = [-(-len(tokens) // self._info.block_size) for tokens in self._tokens]
        return torch.tensor([block for blocks, n in zip(self._blocks, used, strict=True) for block in blocks[:n]])

    def passes_bitwise(self) -> bool:
        """Whether every row has the same bits whatever else is in its step.

        Raises `UnsupportedModelError` where other tokens of the step change the numbers, or where they are not finite.
        """
        long, short = map(len, self._tokens)
        self._alone = [rows for spans in ([(0, 0, long)], [(1, 0, short)]) for _, _, rows in self._rows([spans])]
        self._largest = [rows.abs().max() for rows in self._alone]
        if not all(rows.isfinite().all() for rows in self._alone):
            reason = f"its logits are not finite in {self._info.dtype}"
            raise UnsupportedModelError(self._info.model_type, reason, "Choose another dtype, or check its weights")
        if not all(self._largest):
            reason = f"its logits are all 0 in {self._info.dtype}"
            way_out = "Choose another dtype if its numbers overflow, or check its weights"
            raise UnsupportedModelError(self._info.model_type, reason, way_out)
        packed: list[Spans] = [[(0, 0, long), (1, 0, short)]]
        outcomes = [self._compare(steps) for steps in (packed, self._chunked(long), self._decoded(long, short))]
        drift = torch.cat([drifts for _, drifts in outcomes]).median()
        if not drift <= _TOLERANCE.get(self._info.dtype, _HALF_TOLERANCE):
            reason = f"it mixes tokens outside attention (logits moved by {drift:.1%} with the batch)"
            raise UnsupportedModelError(self._info.model_type, reason, OTHER_ENGINE)
        return all(equal for equal, _ in outcomes)

    def _chunked(self, long: int) -> list[Spans]:
        steps: list[Spans] = []
        start = 0
        for size in (*_CHUNKS, long):
            count = min(size, long - start)
            if count > 0:
                steps.append([(0, start, count)])
            start += count
        return steps

    def _decoded(self, long: int, short: int) -> list[Spans]:
        count = min(_NUM_DECODES, long - 1, short - 1)
        steps: list[Spans] = [[(1, 0, short - count), (0, 0, long - count)]]
        steps += [[(1, short - count + i, 1), (0, long - count + i, 1)] for i in range(count)]
        return steps

    def _compare(self, steps: Sequence[Spans]) -> tuple[bool, Tensor]:
        """Whether all rows are equal to those alone, and how far off the first rows of spans are.

        State that does not live in the cache shows there first. Half of them off is no accident; one of them may be,
        where rounding sends a token to another expert.
        """
        equal, drifts = True, []
        for number, start, rows in self._rows(steps):
            alone = self._alone[number]
            drifts.append((rows[0] - alone[start]).abs().max() / self._largest[number])
            equal = equal and torch.equal(rows, alone[start : start + len(rows)])
        return equal, torch.stack(drifts)

    def _rows(self, steps: Sequence[Spans]) -> Iterator[tuple[int, int, Tensor]]:
        """The logits of each span, one step after the other: with a large vocabulary all of them are many megabytes."""
        for step_id, spans in enumerate(steps):
            plan = StepPlan(step_id=step_id, others=tuple(self._scheduled(*span) for span in spans))
            logits = torch.split(self._run(plan), [count for _, _, count in spans])
            for (number, start, _), part in zip(spans, logits, strict=True):
                yield number, start, part

    def _scheduled(self, number: int, start: int, count: int) -> ScheduledSequence:
        num_blocks = -(-(start + count) // self._info.block_size)
        return ScheduledSequence(
            sequence_id=number,
            first_position=start,
            token_ids=tuple(self._tokens[number][start : start + count]),
            block_ids=tuple(self._blocks[number][:num_blocks]),
            draw=_GREEDY,
            num_draws=count,
            state_slot=number if self._info.num_state_slots else None,
        )
