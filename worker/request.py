"""What a client wishes for and what it gets back, as plain data: the words that every floor shares.

What may live here: frozen dataclasses and enums of the token world, with the checks of their own fields. What may not:
state that changes during a request (`sequence.py`), text (`router/`), wire formats, torch, Ray.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from worker.errors import InvalidRequestError

MAX_SEED: Final = 2**63 - 1
"""Seeds are non-negative and fit a signed 64-bit integer, in every language that speaks the proto."""

GREEDY_TEMPERATURE: Final = 1e-5
"""Below this temperature a draw is an argmax."""


class Priority(IntEnum):
    """Classes of service. A smaller value goes first and is preempted last."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """`max_tokens` was reached, or the model's context is full."""
    ABORT = "abort"
    """The caller cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop. The call shape follows vLLM's class of the same name.

    Raises `InvalidRequestError`, naming the field, for a value outside its limits.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. In [0, 100]."""
    top_k: int = 0
    """Draw among the k best tokens; 0 (or -1) means all."""
    top_p: float = 1.0
    """Draw among the smallest set of tokens with at least this mass. In (0, 1]."""
    seed: int | None = None
    """Key of the noise. None: a seed derived from the request id. In [0, 2**63)."""
    max_tokens: int | None = 16
    """At most this many output tokens; None means as many as the context holds."""
    stop: str | Sequence[str] = ()
    """Text that ends the output. Applied by the text world; stored as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's own end-of-sequence tokens. Stored as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens (for benchmarks)."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check_draw()
        self._check_stop()

    def _check_draw(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "must be a number in [0, 100]")
        _require("top_k", self.top_k, self.top_k >= 0, "must be at least 1, or 0 for all tokens")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]")
        seed_ok = self.seed is None or 0 <= self.seed <= MAX_SEED
        _require("seed", self.seed, seed_ok, f"must be in [0, {MAX_SEED}]")

    def _check_stop(self) -> None:
        tokens_ok = self.max_tokens is None or self.max_tokens >= 1
        _require("max_tokens", self.max_tokens, tokens_ok, "must be at least 1")
        _require("stop", self.stop, all(self.stop), "stop strings must not be empty")
        ids_ok = all(token_id >= 0 for token_id in self.stop_token_ids)
        _require("stop_token_ids", self.stop_token_ids, ids_ok, "token ids must not be negative")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as the token world sees it. `sampling_params.seed` is set: whoever made the request chose it.

    A request with `output_token_ids` goes on after them: this one mechanism serves failover, draining and preemption.
    The sequence then draws output token number `len(output_token_ids)` next, and reports indices from there.
    """

    request_id: str
    """Unique among the requests that are alive in one engine."""
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: Priority = Priority.NORMAL
    output_token_ids: tuple[int, ...] = ()
    """Tokens emitted before, by this or another replica."""
    cache_salt: str = ""
    """Only requests with the same salt find each other's prefixes in the cache, and so cannot time each other's."""

    def __post_init__(self) -> None:
        assert self.sampling_params.seed is not None, "the seed is resolved before a request reaches the engine"
        if not self.prompt_token_ids:
            raise InvalidRequestError("prompt", (), "must have at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What one step did for one request."""

    request_id: str
    first_token_index: int
    """Output position of `token_ids[0]`, counted from the request's very first output token."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last delta of a request, exactly once."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache, not computed. Told with output token 0 and only there: once
    for a request, whatever happens to it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy a replica is: what routers balance on."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    """Tokens not yet computed for the waiting and running sequences."""
    num_free_blocks: int
    num_total_blocks: int


def _require(field: str, value: object, ok: bool, limit: str) -> None:
    if not ok or (isinstance(value, float) and math.isnan(value)):
        raise InvalidRequestError(f"sampling_params.{field}", value, limit)
