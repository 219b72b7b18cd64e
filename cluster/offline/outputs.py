"""Output types of offline inference. Names and shape follow vLLM's, so that existing scripts keep running.

Plain data.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

from holdfast.cluster.offline.lora import LoRARequest
from holdfast.router.generation import RequestFigures
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import Neutral, is_flag, is_number, takes_neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of a token under the model, before any penalty, filter or temperature."""

    logprob: float
    rank: int | None
    """1 for the likeliest; None of a token that was asked for by its id."""
    decoded_token: str
    """Text of the token; special tokens are written out, and so are bytes that are no whole character (`bytes:\\xf0`).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None while the sequence is running."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it; None for the model's own end, or no end."""
    cumulative_logprob: float | None = None
    """Sum of the output tokens' log-probabilities; set with `logprobs`, `best_of` and beams."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Mapping by token id for each output token: the token itself, then the best ones requested. None: not requested.
    """

    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    """vLLM's attributes without a counterpart here."""

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request's events. Times named `_ts` are of the monotonic clock."""

    arrival_time: float
    """Time of submission in seconds since 1970."""
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    """Seconds from its submission to its first token."""
    num_generation_tokens: int
    """Output tokens of all sequences of the request."""
    figures: RequestFigures | None = None
    """Times and counts by phase, as servers tell them; None of a request that was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its output so far."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Mapping by token id for each prompt token: the token itself, then the best ones; None for the first token. None:
    not requested."""
    metrics: RequestMetrics | None = None
    """Metrics of a finished request; None for a beam search."""
    error: HoldfastError | None = None
    """Why a request ended without finishing. Only callbacks see it; everyone else gets it raised."""

    lora_request: LoRARequest | None = None
    """Adapter that it ran with."""
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
    """vLLM's attributes without a counterpart here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """Vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """Scores of a prompt, one for each label; with an activation they are probabilities."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


Pooled = TypeVar("Pooled", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequestOutput(Generic[Pooled]):
    """A pooling request and its result."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam that a search has found."""

    tokens: list[int]
    """The prompt's, then the output's."""
    logprobs: list[dict[int, Logprob]]
    """Mapping by token id for each output token: the candidates at its position, the token among them."""
    cum_logprob: float
    """Sum of the output tokens' log-probabilities, that of an end of sequence included."""
    text: str
    """Text of all `tokens`."""
    finish_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """Results of a beam search for one prompt, best first."""

    sequences: list[BeamSearchSequence]


_BEAM_FIELDS: Final[Neutral] = {
    "structured_outputs": (None,),
    "skip_special_tokens": (True,),
    "watermarking": (None,),
    "allowed_token_ids": (None,),
}
"""Fields of vLLM's class, with their neutral values."""


@takes_neutral(_BEAM_FIELDS, "")
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. The call shape follows vLLM's class of the same name."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Beams are ranked by the model's log-probabilities, so only 0 is accepted."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the end of sequence as a beam's last token."""

    def sampling_params(self) -> SamplingParams:
        """The search as a request, for all beams that there are. Raises `InvalidRequestError`."""
        if not is_flag(self.include_stop_str_in_output):
            limit = "must be True or False"
            raise InvalidRequestError("include_stop_str_in_output", self.include_stop_str_in_output, limit)
        if not is_number(self.temperature) or self.temperature != 0:
            raise InvalidRequestError("temperature", self.temperature, "must be 0: a beam search does not sample")
        params = SamplingParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )
        return params.with_changes(n=self.beam_width)
