"""Output types of offline inference. Names and shape follow vLLM's, so that existing scripts keep running.

Plain data. What may not live here: how outputs are made (`rendering.py`).
"""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.worker.errors import HoldfastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely the model found a token, before any control or temperature."""

    logprob: float
    rank: int | None
    """1 for the likeliest; None of a token that was asked for by its id."""
    decoded_token: str
    """What the token adds to a text; special tokens are written out, and so are bytes that are no whole character
    (`bytes:\\xf0`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None while the sequence goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it; None for the model's own end, or no end."""
    cumulative_logprob: float | None = None
    """Sum of the output tokens' log-probabilities; set with `logprobs`, `best_of` and beams."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token, by token id: that token, then the best ones that were asked for. None: not asked for."""

    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    """vLLM's attributes for what is not here."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request. Times named `_ts` are of the monotonic clock."""

    arrival_time: float
    """In seconds since 1970, as the request was submitted."""
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    """Seconds from its submission to its first token."""
    num_generation_tokens: int
    """Of all its sequences."""


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, by token id: that token, then the best ones; None for the first. None: not asked for."""
    metrics: RequestMetrics | None = None
    """Of a request that has finished; None for a beam search."""
    error: HoldfastError | None = None
    """Why a request ended without finishing. Only callbacks see it; everyone else gets it raised."""

    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
    """vLLM's attributes for what is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam that a search has found."""

    tokens: list[int]
    """The prompt's, then the output's."""
    logprobs: list[dict[int, Logprob]]
    """For each output token, by token id: the candidates at its place, with that token among them."""
    cum_logprob: float
    """Sum of the output tokens' log-probabilities, that of an end of sequence included."""
    text: str
    """That of all `tokens`."""
    finish_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """What a beam search has found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
