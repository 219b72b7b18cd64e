"""Token buckets: how many requests, and how many tokens of prompts and outputs, a caller may use in a minute.

Time is passed in. Output tokens are known when a request has ended, and are taken then, so a bucket may be in debt;
until it is paid back, requests are refused. In the long run a caller gets its rate exactly. What may not live here:
whose rate it is (`api_keys.py`), what is refused (`gate.py`).
"""

from typing import Final

BURST_S: Final = 10.0
"""Seconds of its rate that a bucket holds: so much may come at once after a pause."""


A_HAIR: Final = 1e-6
"""Times are sums of floats: a wait that has been kept is over."""


class TokenBucket:
    """Fills steadily up to its capacity. Full at first."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_s = per_minute / 60
        self._capacity = max(1.0, self.per_s * BURST_S)
        self._level = self._capacity
        self._at = now

    def wait_s(self, now: float, least: float) -> float:
        """Seconds until it holds `least`; 0 if it does."""
        missing = least - self._filled(now)
        return missing / self.per_s if missing > A_HAIR else 0.0

    def take(self, amount: float, now: float) -> None:
        """Takes so much out, whether it holds so much or not."""
        self._level = self._filled(now) - amount

    def _filled(self, now: float) -> float:
        self._level = min(self._capacity, self._level + max(0.0, now - self._at) * self.per_s)
        self._at = max(now, self._at)
        return self._level


class Rates:
    """The buckets of one key."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None, now: float) -> None:
        self.limits = requests_per_minute, tokens_per_minute
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute, now)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, now)

    def wait_s(self, now: float) -> tuple[float, str]:
        """Seconds until one more request may come, and the name of the rate that is used up; 0 if it may come now."""
        waits = [(0.0, "")]
        if self._requests is not None:
            waits.append((self._requests.wait_s(now, 1.0), "requests_per_minute"))
        if self._tokens is not None:
            waits.append((self._tokens.wait_s(now, 2 * A_HAIR), "tokens_per_minute"))
        return max(waits)

    def take_request(self, now: float) -> None:
        if self._requests is not None:
            self._requests.take(1.0, now)

    def take_tokens(self, number: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(number, now)
