"""The words that go into the dispatch core and come out of it, as plain data.

What may live here: frozen dataclasses, and what each of them promises. What may not: decisions (`dispatch.py`), wire
formats (`wire.py`), IO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenLogprob

# --- in: what a replica says ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a replica says of itself when the link comes up."""

    replica_id: str
    model: str
    """The name that clients use."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    row_invariant: bool
    eos_token_ids: frozenset[int] = frozenset()
    """The tokens that end a sequence by the model's own word."""
    numerics: str = ""
    """What else its bits depend on: the weights and the arithmetic, in words that are equal where those are."""
    answers_digest: bytes = b""
    """The same by measurement: of its answer to a fixed question. Empty where it was not asked."""

    @property
    def fingerprint(self) -> str:
        """Names all that a completion is a function of, the request aside. Equal fingerprints, equal tokens, if
        arithmetic is row-invariant.
        """
        arithmetic = "row-invariant" if self.row_invariant else "row-variant"
        measured = (self.answers_digest.hex(), arithmetic)
        return "/".join(filter(None, (self.model, f"tp{self.tensor_parallel_size}", self.numerics, *measured)))

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence that one request can have here: the model's context, or all of the KV cache."""
        return min(self.max_model_len, self.block_size * self.num_blocks)


class Likelihood(NamedTuple):
    """What a replica says of a prompt token, which the router knows already. Fields are those of `TokenLogprob`."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    def of(self, token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id=token_id, logprob=self.logprob, rank=self.rank, top=self.top)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDelta:
    """What one engine step did for one attempt."""

    attempt: int
    first_token_index: int
    """Output position of `token_ids[0]`, counted from the request's very first output token."""
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    """Set on the last delta of an attempt."""
    num_cached_tokens: int = 0
    """Prompt tokens that the replica found in its cache; told with output token 0 alone."""
    logprobs: Sequence[TokenLogprob] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: Sequence[Likelihood] = ()
    """One for each prompt token from the second on where the request asks for them; told with output token 0 alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRejection:
    """An attempt that the replica will not run, and why."""

    attempt: int
    error: HoldfastError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's counts since its start, and its blocks as of one of its last steps, named as the engine's."""

    num_steps: int
    num_requests: int
    num_finished: int
    num_aborted: int
    num_tokens_generated: int
    num_tokens_computed: int
    num_tokens_recomputed: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_evictions: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_wasted_slots: int
    step_time_s: float
    num_forked_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """What one engine step did for the requests of this router, and how busy the replica is after it."""

    load: EngineLoad
    deltas: Sequence[AttemptDelta] = ()
    rejections: Sequence[AttemptRejection] = ()
    stored: Sequence[int] = ()
    """Short hashes of blocks that came to be cached there (`worker/block_hash.py`)."""
    evicted: Sequence[int] = ()
    """Of blocks that are no longer cached there."""
    stats: ReplicaStats | None = None
    """Told now and then, and whenever the replica has fallen idle."""


# --- in: the text of one sequence ---


class TextPiece(Protocol):
    """What tokens turned into."""

    @property
    def text(self) -> str:
        """Text that is now certain."""

    @property
    def num_tokens(self) -> int:
        """How many of the tokens are part of the output: all, unless a stop string ended among them."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete: the output ends here."""


class TextState(Protocol):
    """Turns one sequence's tokens into text. A pure function of the tokens pushed so far (see `text_stream.py`)."""

    def push(self, token_ids: Sequence[int]) -> TextPiece: ...

    def finish(self) -> str:
        """The text that was still held back; called once, when the sequence has ended without a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """What came of the output that a request begins with, when its tokens were pushed again (see `resume.py`)."""

    unsent_text: str = ""
    """Text that is certain and that the client has not got."""
    fingerprint: str = ""
    """Of where the output came from; empty if not known."""
    finish_reason: FinishReason | None = None
    """Set if the output is complete: there is nothing to go on with."""


FRESH: Final = CaughtUp()
"""Of a request without output."""

# --- out: what the shell must do ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request has cost, in tokens."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    """Those of `num_prompt_tokens` that were cached. As of the first attempt that came to a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSubmit:
    """Ask a replica to run a request, from the output tokens that it carries on."""

    replica_id: str
    attempt: int
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell a replica that nobody waits for this attempt any more."""

    replica_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Output for the client. The deliveries of one request continue each other without gap or overlap."""

    request_id: str
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set on the last delivery, and `usage` with it: the request is over."""
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token from the second on where the request asks for them; on the first delivery alone."""
    sequence_index: int = 0
    """Which of the client's completions it belongs to."""
    num_cached_tokens: int = 0
    """As `Usage` says it in the end."""
    fingerprint: str = ""
    """`ReplicaFacts.fingerprint` of where the tokens come from."""
    identity_guaranteed: bool = True
    """False once the request went on where equal tokens are not certain: the text is sound, another run may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request is over, with an error."""

    request_id: str
    error: HoldfastError


Action = SendSubmit | SendAbort | Deliver | Fail


# --- out: what can be asked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """What is known of a model that is, or was, served here."""

    name: str
    facts: ReplicaFacts
    """Such that every replica that is up can do it: the smallest length and cache, invariant only if all are."""
    num_replicas: int
    """Replicas that are up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is, as it last said."""

    replica_id: str
    model: str
    load: EngineLoad
    stats: ReplicaStats | None = None
    """None until it has told."""
