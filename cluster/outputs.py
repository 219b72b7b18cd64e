"""What offline callers get back. The names and the shape follow vLLM's, so that scripts people have keep running."""

from dataclasses import dataclass

from worker.errors import HoldfastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely the model found a token, before any control or temperature."""

    logprob: float
    rank: int
    """1 for the likeliest."""
    decoded_token: str
    """The token's text by itself; special tokens are written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None while the sequence goes on."""
    cumulative_logprob: float | None = None
    """Sum of the output tokens' log-probabilities; set with `logprobs`."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token, by token id: that token, then the best ones that were asked for. None: not asked for."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and what has come of it so far."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Those of the prompt's tokens that were found in the prefix cache."""
    error: HoldfastError | None = None
    """Why a request ended without finishing. Only callbacks see it; everyone else gets it raised."""
