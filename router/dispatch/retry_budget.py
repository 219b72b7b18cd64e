"""Retry budget: a token bucket that limits how fast requests that lost their replica are sent again.

A retry costs a prefill of all tokens so far, and retries must not overload a weakened cluster. The bucket holds `burst`
tokens, enough for all requests of several replicas. Time fills it, and so does a share of the new submissions. With an
empty bucket retries wait; none is dropped.
"""

from typing import Final

_ROUNDING: Final = 1e-9


class RetryBudget:
    """A token bucket. The caller passes the time, which must not run backwards."""

    def __init__(self, *, burst: float, per_s: float, share: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._share = share
        self._num_tokens = float(burst)
        self._filled_at: float | None = None

    def note_submission(self) -> None:
        """A new request came in."""
        self._num_tokens = min(self._burst, self._num_tokens + self._share)

    def has_token(self, now: float) -> bool:
        """Whether a lost request may be sent again now."""
        filled_at = now if self._filled_at is None else self._filled_at
        self._num_tokens = min(self._burst, self._num_tokens + self._per_s * max(now - filled_at, 0.0))
        self._filled_at = now
        return self._num_tokens >= 1 - _ROUNDING

    def spend(self) -> None:
        """A lost request is sent again. There must be a token."""
        assert self._num_tokens >= 1 - _ROUNDING, "the budget is spent"
        self._num_tokens -= 1

    @property
    def ready_at(self) -> float | None:
        """When there will be a token again; None if there is one."""
        if self._num_tokens >= 1 - _ROUNDING or self._filled_at is None:
            return None
        return self._filled_at + (1 - self._num_tokens) / self._per_s
