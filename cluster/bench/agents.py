"""Sessions of coding agents: turns, lengths and pauses of tools, drawn so that their medians are those of a trace.

The published trace has medians of 43 turns a session, 142,000 tokens in and 444 out a request, and more than 96 % of
the tokens in were seen before. How the lengths spread, and the pauses, are assumptions of this file.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from holdfast.cluster.bench.workload import Lengths, Session, Turn, Workload
from holdfast.worker.errors import ConfigurationError

NUM_TURNS: Final = 43
_TURNS_SIGMA: Final = 0.4  # of the lognormal number of turns
_FIRST_PROMPT: Final = (90_000, 0.25)
"""Median in tokens and sigma of the first prompt: system prompt, tools, files."""
_TOOL_RESULT: Final = (1_000, 1.0)  # median in tokens, sigma
_OUTPUT: Final = (444, 0.8)  # median in tokens, sigma
_WINDOW_TOKENS: Final = 256_000
"""A session ends before its conversation is longer than this."""
_PAUSE: Final = (10.0, 1.1)
"""Median in seconds and sigma of a tool's run: one in twenty takes more than a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload(Workload):
    """Sessions of agents. `prompt_tokens` are those of later turns: results of tools."""

    first_tokens: Lengths
    window_tokens: float
    pause_scale: float = 1.0

    @classmethod
    def scaled(cls, scale: float, *, pause_scale: float = 1.0, num_turns: int = NUM_TURNS, seed: int = 0) -> Workload:
        """All lengths times `scale`, all pauses times `pause_scale`. Raises `ConfigurationError`."""
        if not 0 < scale <= 1:
            raise ConfigurationError(f"--agent-scale {scale:g}: must be above 0, and at most 1")
        if not (math.isfinite(pause_scale) and pause_scale >= 0):
            raise ConfigurationError(f"--agent-pauses {pause_scale:g}: must be a number that is not below 0")
        first, tool, output = (
            Lengths("lognormal", median * scale, sigma) for median, sigma in (_FIRST_PROMPT, _TOOL_RESULT, _OUTPUT)
        )
        return cls(
            prompt_tokens=tool,
            output_tokens=output,
            num_turns=num_turns,
            seed=seed,
            first_tokens=first,
            window_tokens=_WINDOW_TOKENS * scale,
            pause_scale=pause_scale,
        )

    def sessions(self, first_number: int = 0) -> Iterator[Session]:
        """Yields sessions without end. The first turn of each is due after a pause, as later ones are."""
        rng = random.Random(f"{self.seed}/agents")
        for number in count(first_number):
            turns = self._turns(rng)
            yield Session(number, turns, start_s=self._pause_s(rng))

    def _turns(self, rng: random.Random) -> tuple[Turn, ...]:
        num_turns = Lengths("lognormal", self.num_turns, _TURNS_SIGMA).draw(rng)
        turns: list[Turn] = []
        left = self.window_tokens
        for index in range(num_turns):
            num_new = (self.prompt_tokens if index else self.first_tokens).draw(rng)
            num_output = self.output_tokens.draw(rng)
            left -= num_new + num_output
            if left < 0 and turns:
                break
            turns.append(Turn(num_new, num_output, pause_s=self._pause_s(rng) if index else 0.0))
        return tuple(turns)

    def _pause_s(self, rng: random.Random) -> float:
        median_s, sigma = _PAUSE
        return self.pause_scale * median_s * math.exp(rng.gauss(0.0, sigma))
