"""Step tuner: it learns from an engine's measured steps and sets the limits of the next one to meet the target time."""

from dataclasses import dataclass, replace
from typing import Final

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.scheduler.batching import StepLimits
from holdfast.worker.scheduler.batching_optimizer import BatchingOptimizer, Recommendation, StepReport
from holdfast.worker.scheduler.step_time import StepCosts, StepSample, StepShape, StepTimeModel
from holdfast.worker.step_plan import StepPlan

DEFAULT_TARGET_TPOT_MS: Final = 50.0
"""Target of advice without a setting: text as fast as people read."""

ADVISE_EVERY: Final = 16
"""Steps that are learned from together where that changes no step."""


class StepTuner:
    """One engine's model of its steps, and the decisions from it.

    With `target_tpot_ms`, prompts get in each step the rest of the target after the decodes. It holds for typical
    steps: the model's usual error is kept free, but the time of a single step cannot be guaranteed. And prompts get at
    least a block in each step, so that none waits for ever where the decodes alone take longer than the target.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_speculative_tokens: int = 0,
        costs: StepCosts | None = None,
    ) -> None:
        """`num_speculative_tokens` as configured, 0 without speculation; `costs` as far as they are known already."""
        target_tpot_ms = config.target_tpot_ms or DEFAULT_TARGET_TPOT_MS
        self.model = StepTimeModel(costs)
        self._limits_prefills = config.target_tpot_ms is not None
        self.acts = config.auto_tune or self._limits_prefills
        """Whether it sets limits, by `next_limits`; otherwise it only recommends."""
        self._target_s = target_tpot_ms / 1000
        self._block_size = block_size
        self._unread: list[tuple[StepPlan, float, int, int]] = []
        """Steps that nothing was learned from yet, as `observe` is given them."""
        self._next = _NextStep(decodes=StepShape(num_decodes=0, num_tokens=0, num_context_tokens=0), prefill_position=0)
        self._optimizer = BatchingOptimizer(
            StepLimits.of(config, num_speculative_tokens),
            self.model,
            target_tpot_s=self._target_s,
            auto_tune=config.auto_tune,
            num_speculative_tokens=num_speculative_tokens,
        )

    def observe(
        self, plan: StepPlan, *, step_s: float, num_gained: int, num_waiting: int
    ) -> tuple[Recommendation, ...]:
        """Take in a completed step; returns new recommendations.

        `num_gained` tokens came out of it, and `num_waiting` requests are left without a place. If no decision depends
        on it, several steps are learned from together: no step waits for it.
        """
        self._unread.append((plan, step_s, num_gained, num_waiting))
        return self._learn() if self.acts or len(self._unread) >= ADVISE_EVERY else ()

    def _learn(self) -> tuple[Recommendation, ...]:
        news: tuple[Recommendation, ...] = ()
        for plan, step_s, num_gained, num_waiting in self._unread:
            report, self._next = _read(plan, step_s, num_gained, num_waiting)
            self.model.observe(report.sample)
            news += self._optimizer.observe(report)
        self._unread.clear()
        return news

    def next_limits(self) -> StepLimits:
        """Limits for the step after the last one observed, of a tuner that `acts`."""
        limits = self._optimizer.limits
        if not self._limits_prefills:
            return limits
        return replace(limits, max_num_prefill_tokens=self._num_prefill_tokens(limits.max_num_batched_tokens))

    def get_recommendations(self) -> list[Recommendation]:
        """Settings that should not be as they are configured, and why."""
        self._learn()
        return self._optimizer.get_recommendations()

    def _num_prefill_tokens(self, most: int) -> int:
        """Prefill tokens in whole blocks: a part of one is computed as if it were whole, and cannot be shared yet."""
        limit_s = self._target_s / (1 + 2 * self.model.relative_error)
        fits = self.model.costs.prefill_tokens_within(
            limit_s, self._next.decodes, first_position=self._next.prefill_position, most=most
        )
        return max(self._block_size, fits - fits % self._block_size)


@dataclass(slots=True, kw_only=True)
class _NextStep:
    """Bounds on the following step: at most this many decodes, and prompts with this many computed tokens."""

    decodes: StepShape
    prefill_position: int


def _read(plan: StepPlan, step_s: float, num_gained: int, num_waiting: int) -> tuple[StepReport, _NextStep]:
    """Runs at every step, so it is quick with what most steps are made of: decodes of one token."""
    rows, others = plan.decodes, plan.others
    num_decodes = num_decode_tokens = len(rows.token_ids)
    decode_context = rows.num_context_tokens
    chunk_context = num_last_chunks = last_chunk_context = position = 0
    for item in others:
        count = len(item.token_ids)
        num_attended = count * item.first_position + count * (count + 1) // 2  # position + 1, summed over its tokens
        if item.num_draws == count:
            num_decodes += 1
            num_decode_tokens += count
            decode_context += num_attended
            continue
        chunk_context += num_attended
        end = item.first_position + count
        if item.num_draws:
            num_last_chunks += 1
            last_chunk_context += end
        else:
            position = max(position, end)
    sample = StepSample(
        num_seqs=len(rows.token_ids) + len(others),
        num_decodes=num_decodes,
        num_tokens=plan.num_tokens // rows.num_steps,
        num_context_tokens=decode_context + chunk_context,
        step_s=step_s,
    )
    report = StepReport(
        sample=sample,
        num_decode_tokens=num_decode_tokens,
        num_decode_context_tokens=decode_context,
        num_accepted_drafts=max(0, num_gained - num_decodes - num_last_chunks),
        num_waiting=num_waiting,
    )
    num_next_tokens = num_decode_tokens + num_last_chunks
    decodes = StepShape(
        num_decodes=num_decodes + num_last_chunks,
        num_tokens=num_next_tokens,
        num_context_tokens=decode_context + last_chunk_context + num_next_tokens,  # each one further
    )
    return report, _NextStep(decodes=decodes, prefill_position=position)
