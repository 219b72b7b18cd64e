"""Role split: how many replicas of a model compute long prompts alone, by the load. A core: time is passed in.

The load is that of long prompts, in seconds of computing for each second: what replicas have reported to compute of all
prompts, times the share of long ones among those that this router gets. Every replica tells all routers the same, and
the shares of several routers are about equal, so routers agree but for moments. If they do not, a prompt is computed
where another router would not have it computed, and nothing else.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

LONG_TOKENS: Final = 1024
"""Tokens from which a prompt counts as long: it takes two steps or more, each of which makes streams wait."""
WINDOW_S: Final = 20.0
"""Time constant of the means."""
LOOK_S: Final = 1.0
"""Time between two decisions."""
SPARE: Final = 0.3
"""Replicas by which the load may exceed a number before there is one more. Prompts that would wait for too long are
computed where they are decoded, so the last replica need not hold all of it.
"""
MAX_SHARE: Final = 0.5
"""Share of the replicas that compute prompts at most: with more, too few decode (`python -m benchmarks.roles`)."""
HOLD_S: Final = 60.0
"""Seconds for which fewer replicas must have been enough."""


class Computed(NamedTuple):
    """Prompt tokens that a replica has computed."""

    replica_id: str
    num_tokens: int
    """Since its start."""
    tokens_per_s: float
    """Measured speed; 0: not known yet."""


class Mean:
    """Sum over the last `WINDOW_S` or so, in which older amounts weigh exponentially less."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at_s: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Notes an amount at a time in seconds."""
        self._sum = self.at(now) + amount
        self._at_s = now

    def at(self, now: float) -> float:
        """The sum at a time, no earlier than the last amount."""
        return 0.0 if self._at_s is None else self._sum * math.exp(-(now - self._at_s) / WINDOW_S)


class RoleSplit:
    """Decides for one model in one router."""

    def __init__(self, least: int, most: int | None, long_tokens: int | None = None) -> None:
        """`least` to `most` replicas; `most` None: always `least`. Prompts of `long_tokens` tokens are long; None: of
        `LONG_TOKENS`.
        """
        self._least = least
        self._most = most
        self.follows_load = most is not None
        """Whether the number changes."""
        self._long_tokens = long_tokens or LONG_TOKENS
        self._all, self._long, self._computing = Mean(), Mean(), Mean()
        self._seen: dict[str, int] = {}
        self._wanted = deque[tuple[float, int]]()
        """Numbers of the last `HOLD_S`."""
        self._looked_s: float | None = None
        self.number = least

    def note_prompt(self, num_tokens: int, now: float) -> None:
        """A request has come, with a prompt of this number of tokens."""
        self._all.add(num_tokens, now)
        if num_tokens >= self._long_tokens:
            self._long.add(num_tokens, now)

    def is_due(self, now: float) -> bool:
        """Whether `look` may be called."""
        return self.follows_load and (self._looked_s is None or now - self._looked_s >= LOOK_S)

    def look(self, replicas: Iterable[Computed], now: float) -> bool:
        """Takes in what the replicas have computed, and decides. Whether the number has changed."""
        assert self._most is not None, "the number follows the load"
        computed = list(replicas)
        for one in computed:
            new = one.num_tokens - self._seen.get(one.replica_id, one.num_tokens)
            if new > 0 and one.tokens_per_s > 0:
                self._computing.add(new / one.tokens_per_s, now)
        self._seen = {one.replica_id: one.num_tokens for one in computed}
        self._looked_s = now
        wanted = math.ceil(self.load(now) - SPARE)
        most = min(self._most, max(self._least, round(MAX_SHARE * len(computed))))
        self._wanted.append((now, min(max(wanted, self._least), most)))
        while self._wanted[0][0] <= now - HOLD_S:
            self._wanted.popleft()
        before, self.number = self.number, max(number for _, number in self._wanted)
        return self.number != before

    def load(self, now: float) -> float:
        """Replicas that would be busy with long prompts all the time."""
        total = self._all.at(now)
        share = self._long.at(now) / total if total else 0.0
        return share * self._computing.at(now) / WINDOW_S
