"""Acceptance of requests: refuses requests that can never run, and drops requests whose deadline cannot be met at the
measured speeds.
"""

from collections.abc import Hashable
from enum import Enum
from typing import Final, NamedTuple

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus
from holdfast.worker.step_plan import StepPlan
from holdfast.worker.step_update import EngineStats
from holdfast.worker.timers import Timers

MIN_PREFILL_TOKENS: Final = 64
"""Steps with fewer prompt tokens say little of the speed of prefill: their fixed costs are most of their time."""

NUM_FIRST_PREFILLS: Final = 8
"""Number of such steps before a speed is reported: the first ones after a load are slow."""

PREFILL_SPEED_LOSS: Final = 0.01
"""The share of a speed that is forgotten with each such step that does not reach it."""


def check_can_end(request: EngineRequest, eos_token_ids: frozenset[int]) -> None:
    """Raises `InvalidRequestError` for an output with a grammar, of a model that has no token to end it with."""
    if not eos_token_ids:
        limit = "is not possible: the model has no end-of-sequence token to end the output with"
        raise InvalidRequestError("sampling_params.structured_outputs", request.sampling_params.structure, limit)


def check_fits(sequence: Sequence, *, num_slots: int, max_model_len: int) -> None:
    """Raises `InvalidRequestError` if a sequence is longer than the context, or than the whole KV cache.

    `num_slots` is the number of tokens that the KV cache holds.
    """
    num_prompt_tokens = sequence.num_prompt_tokens
    room = 1 if sequence.pool_rows is None else 0  # for the first token of the output
    max_prompt_tokens = min(max_model_len - room, num_slots)
    if num_prompt_tokens > max_prompt_tokens:
        limit = f"must be at most {max_prompt_tokens} tokens: the context holds {max_model_len} with the output"
        raise InvalidRequestError(
            "prompt", f"{num_prompt_tokens} tokens", f"{limit}, and the KV cache {num_slots} in all"
        )
    if sequence.max_len - 1 > num_slots:  # the last token is sampled and never computed
        limit = f"must be at most {num_slots + 1 - num_prompt_tokens} after a prompt of {num_prompt_tokens} tokens"
        max_tokens = sequence.request.sampling_params.max_tokens
        raise InvalidRequestError(
            "sampling_params.max_tokens", max_tokens, f"{limit}: the KV cache holds {num_slots} in all"
        )


class DropReason(Enum):
    """Why a request was dropped without a delta."""

    EXPIRED = "expired"
    """The deadline has passed, or would pass before its first token."""
    NOT_FINITE = "not finite"
    """The logits were NaN or infinite."""
    DEAD_END = "dead end"
    """No token fitted its grammar."""


class DroppedRequest(NamedTuple):
    """A request that was dropped without a delta."""

    attempt: Hashable
    request: EngineRequest
    reason: DropReason


class DeadlineWatch:
    """The deadlines of all requests that have not ended."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._timers = Timers[Sequence]()
        self.tokens_per_s: float | None = None
        """The most tokens that steps compute in a second, as measured by the engine; None: not known.

        Set too low, it drops requests that could have been served; too high, it drops fewer of the hopeless.
        """

    def watch(self, sequence: Sequence) -> None:
        """Watches a sequence with a deadline until it is forgotten."""
        self._timers.set(sequence, self._latest_start_s(sequence))

    def forget(self, sequence: Sequence) -> None:
        self._timers.drop(sequence)

    def next_expired(self, now: float) -> Sequence | None:
        """A sequence whose deadline has passed; it is no longer watched. To be called until None."""
        while (sequence := self._timers.pop(now)) is not None:
            # The condition of the timer may have changed: it runs now, or its prefix is cached.
            latest_start_s = self._latest_start_s(sequence)
            if latest_start_s <= now:
                return sequence
            self._timers.set(sequence, latest_start_s)
        return None

    def _latest_start_s(self, sequence: Sequence) -> float:
        """The latest time to begin running: a bound for the best case without other requests."""
        is_new = sequence.status is SequenceStatus.WAITING and sequence.num_output_tokens == 0
        if self.tokens_per_s is None or not is_new:
            return sequence.deadline_s
        num_cached = self._queues.cached_prefix(sequence).num_tokens
        return sequence.deadline_s - (len(sequence.token_ids) - num_cached) / self.tokens_per_s


class BestSpeeds:
    """The best speeds of full steps. Only the best count: by slower ones the scheduler and routers would drop requests
    that could be served.
    """

    def __init__(self, deadlines: DeadlineWatch, counts: EngineStats) -> None:
        """Sets `DeadlineWatch.tokens_per_s` and `EngineStats.prefill_tokens_per_s`."""
        self._deadlines = deadlines
        self._counts = counts
        self._best_prefill = 0.0
        self._num_prefills = 0

    def note(self, plan: StepPlan, step_s: float, max_num_batched_tokens: int) -> None:
        """A step took this many seconds. The speed of prefill is the best of late, of steps in which prompts have most
        of the tokens, and enough to fill the machine.
        """
        num_tokens = plan.num_tokens
        if num_tokens >= max_num_batched_tokens:
            self._deadlines.tokens_per_s = max(num_tokens / step_s, self._deadlines.tokens_per_s or 0.0)
        if num_tokens - len(plan.decodes.token_ids) >= max(MIN_PREFILL_TOKENS, num_tokens // 2):
            self._num_prefills += 1
            self._best_prefill *= 1 - PREFILL_SPEED_LOSS
            self._best_prefill = max(self._best_prefill, num_tokens / step_s)
            if self._num_prefills >= NUM_FIRST_PREFILLS:
                self._counts.prefill_tokens_per_s = self._best_prefill
