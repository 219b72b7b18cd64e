"""How to draw tokens and when to stop, as plain data, with the checks that need no model.

What may live here: `SamplingParams`, its limits and its own checks. What may not: checks that need a model
(`router/requests/request_processor.py`), what the parameters do (`sampler.py`, `logits_processors.py`, `router/`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameter_types import check_types
from holdfast.worker.structured_outputs import StructuredOutputs

MAX_SEED: Final = 2**63 - 1
"""Seeds are non-negative and fit a signed 64-bit integer, in every language that speaks the proto."""

GREEDY_TEMPERATURE: Final = 1e-5
"""Below this temperature a draw is an argmax."""

MAX_LOGIT_BIAS: Final = 100.0
"""A bias of this size bans a token or forces it, as far as logits go."""

MAX_LOGPROBS: Final = 20
"""Alternatives that can be asked for at each token."""

MAX_BEAM_WIDTH: Final = MAX_LOGPROBS // 2
"""A beam search looks at twice as many candidates as it has beams."""


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
    min_p: float = 0.0
    """Draw among the tokens with at least this share of the best one's probability. In [0, 1]; 0 means all."""
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
    min_tokens: int = 0
    """Until there are this many output tokens, none is drawn that could end the output, and no stop string counts."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or output have, multiplies negative ones. In [0.01, 100]."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time the output has it. In [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of token ids. Each in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw among these tokens alone; None means all. Stored as a tuple."""
    bad_words: str | Sequence[str] = ()
    """Text that must not come up in the output. Made token ids of by the text world; stored as a tuple."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the output as the end of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens, such as the end of sequence, out of the text."""
    logprobs: int | None = None
    """Report each output token's log-probability, and those of so many best tokens. In [0, 20]; None: report none."""
    prompt_logprobs: int | None = None
    """Report each prompt token's log-probability, and those of so many best tokens. In [0, 20]; None: report none."""
    structured_outputs: StructuredOutputs | Mapping[str, object] | None = None
    """What shape the output must have; None means any. Stored as `StructuredOutputs`."""
    n: int = 1
    """Completions to return. Number i is drawn with seed + i."""
    best_of: int | None = None
    """Completions to draw, of which the n with the best mean log-probability are returned; None means n."""
    echo: bool = False
    """Begin the output's text with the prompt's."""
    truncate_prompt_tokens: int | None = None
    """Keep the last tokens of the prompt alone: so many, or with -1 as many as leave room for `max_tokens`."""
    beam_width: int | None = None
    """Search with so many beams instead of drawing, and return the n best of them. In [1, 10]; None: draw."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability over its length to this power. In [-10, 10]."""

    def __post_init__(self) -> None:
        check_types(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        object.__setattr__(self, "bad_words", bad_words)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check_draw()
        self._check_stop()
        self._check_penalties()
        self._check_tokens()
        logprobs_ok = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        _require("logprobs", self.logprobs, logprobs_ok, f"must be in [0, {MAX_LOGPROBS}]")
        prompt_ok = self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS
        _require("prompt_logprobs", self.prompt_logprobs, prompt_ok, f"must be in [0, {MAX_LOGPROBS}]")
        self._check_beams()
        self._check_sequences()

    def _check_draw(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "must be a number in [0, 100]")
        _require("top_k", self.top_k, self.top_k >= 0, "must be at least 1, or 0 for all tokens")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "must be in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "must be in [0, 1]")
        seed_ok = self.seed is None or 0 <= self.seed <= MAX_SEED
        _require("seed", self.seed, seed_ok, f"must be in [0, {MAX_SEED}]")

    def _check_stop(self) -> None:
        tokens_ok = self.max_tokens is None or self.max_tokens >= 1
        _require("max_tokens", self.max_tokens, tokens_ok, "must be at least 1")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "must not be negative")
        least_ok = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require("min_tokens", self.min_tokens, least_ok, f"must be at most max_tokens, {self.max_tokens}")
        _require("stop", self.stop, all(self.stop), "stop strings must not be empty")
        ids_ok = all(token_id >= 0 for token_id in self.stop_token_ids)
        _require("stop_token_ids", self.stop_token_ids, ids_ok, "token ids must not be negative")

    def _check_penalties(self) -> None:
        # Far beyond these limits a penalized logit is no finite float any more.
        repetition_ok = 0.01 <= self.repetition_penalty <= 100
        _require("repetition_penalty", self.repetition_penalty, repetition_ok, "must be a number in [0.01, 100]")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _require(f"{name}_penalty", penalty, -2 <= penalty <= 2, "must be a number in [-2, 2]")

    def _check_tokens(self) -> None:
        largest = MAX_LOGIT_BIAS
        for token_id, bias in self.logit_bias.items():
            _require("logit_bias", token_id, token_id >= 0, "token ids must not be negative")
            _require("logit_bias", bias, -largest <= bias <= largest, f"must be numbers in [{-largest:g}, {largest:g}]")
        allowed = self.allowed_token_ids
        _require("allowed_token_ids", allowed, allowed is None or len(allowed) > 0, "must allow at least one token")
        _require("allowed_token_ids", allowed, min(allowed or (0,)) >= 0, "token ids must not be negative")
        _require("bad_words", self.bad_words, all(map(str.strip, self.bad_words)), "must not be empty or only spaces")

    def _check_sequences(self) -> None:
        _require("n", self.n, self.n >= 1, "must be at least 1")
        best_of_ok = self.best_of is None or self.best_of >= self.n
        _require("best_of", self.best_of, best_of_ok, f"must be at least n, {self.n}")
        kept = self.truncate_prompt_tokens
        kept_ok = kept is None or kept == -1 or kept >= 1
        _require("truncate_prompt_tokens", kept, kept_ok, "must be at least 1, or -1 for as many as fit")

    def _check_beams(self) -> None:
        _require("length_penalty", self.length_penalty, -10 <= self.length_penalty <= 10, "must be in [-10, 10]")
        if self.beam_width is None:
            return
        width_ok = 1 <= self.beam_width <= MAX_BEAM_WIDTH
        _require("beam_width", self.beam_width, width_ok, f"must be in [1, {MAX_BEAM_WIDTH}]")
        _require("n", self.n, self.n <= self.beam_width, f"must be at most beam_width, {self.beam_width}")
        for name, neutral in _NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            _require(name, value, value == neutral, "must not be set with beam_width: a beam search draws nothing")

    @property
    def num_sequences(self) -> int:
        """How many completions are drawn."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def structure(self) -> StructuredOutputs | None:
        return self.structured_outputs  # type: ignore[return-value]  # since __post_init__


_NOT_WITH_BEAMS: Final[Mapping[str, object]] = {
    "best_of": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "allowed_token_ids": None,
    "logit_bias": {},
    "bad_words": (),
    "stop": (),
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Beams are ranked by what the model itself says: what changes or cuts that has no meaning for them."""


def _require(field: str, value: object, ok: bool, limit: str) -> None:
    if not ok or (isinstance(value, float) and math.isnan(value)):
        raise InvalidRequestError(f"sampling_params.{field}", value, limit)
