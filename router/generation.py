"""Output of a request as plain data, from the dispatcher to the client: deltas, and the finished result. Fields are
named as in the proto.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from holdfast.worker.request import FinishReason, SequenceKey, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """Course of a request at one router: times in seconds of wall time, and counts beside its usage."""

    queue_s: float = 0.0
    """Seconds from its admission until it first ran: in the router, and in its first replica."""
    prompt_s: float = 0.0
    """Seconds from there to its first output."""
    first_token_s: float = 0.0
    """Seconds from its admission to its first output."""
    decode_s: float = 0.0
    """Seconds in which replicas generated its output."""
    total_s: float = 0.0
    """Seconds from its admission to its end, pauses included."""
    num_disk_tokens: int = 0
    """Cached tokens whose blocks came from the disk; the others were in memory."""
    num_draft_tokens: int = 0
    """Guessed tokens that were verified."""
    num_accepted_tokens: int = 0
    """Tokens among `num_draft_tokens` that came true."""
    num_attempts: int = 0
    """Replicas that it was sent to, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The token counts of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    """Cached tokens among `num_prompt_tokens`, in the first attempt that brought a token."""
    figures: RequestFigures | None = field(default=None, compare=False)
    """None of a beam search, and of a stream that was complete when it was resumed."""


def together(usages: Sequence[Usage], *, share_prompt: bool) -> Usage:
    """Usage of several sequences, of one prompt (which counts once, with the tokens that were cached for all of them)
    or of a prompt each. Of times and attempts the longest and most count.
    """
    of_prompt: Callable[[Iterable[int]], int] = min if share_prompt else sum
    figures = [usage.figures for usage in usages if usage.figures is not None]
    whole = None
    if len(figures) == len(usages):
        most = {name: max(getattr(one, name) for one in figures) for name in _LONGEST}
        whole = RequestFigures(
            **most,
            num_disk_tokens=of_prompt(one.num_disk_tokens for one in figures),
            num_draft_tokens=sum(one.num_draft_tokens for one in figures),
            num_accepted_tokens=sum(one.num_accepted_tokens for one in figures),
        )
    return Usage(
        num_prompt_tokens=of_prompt(usage.num_prompt_tokens for usage in usages),
        num_completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        num_cached_tokens=of_prompt(usage.num_cached_tokens for usage in usages),
        figures=whole,
    )


_LONGEST: Final = ("queue_s", "prompt_s", "first_token_s", "decode_s", "total_s", "num_attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call, or its new part: `id` and `name` are set where it begins."""

    index: int = 0
    """Counts the calls of one completion, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """A JSON object, as text; of a delta the next piece of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """A chat's output, or its new part, after tool calls and reasoning are parsed."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


NO_SEQUENCE: Final = SequenceKey("", "")


class OutputDelta(NamedTuple):
    """New output of one sequence. A sequence's deltas follow each other without gap or overlap, and a completion as a
    whole is one delta.

    One is made for every token of every stream, and a frozen dataclass takes twice as long to make.
    """

    request_id: str
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set on the last delta of a sequence. A client gets None as well for a reason that it does not know."""
    usage: Usage | None = None
    """Usage of the sequence, on its last delta; clients get that of the request, on the last delta of all."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each prompt token, None for the first, where the request asks for them and the prompt has more than one
    token; on the first delta alone."""
    sequence_index: int = 0
    """Which of the request's sequences it belongs to."""
    num_cached_tokens: int = 0
    """Same as in the final `Usage`; 0 in clients, which have that."""
    system_fingerprint: str = ""
    """`ModelInfo.fingerprint` of the replica that generated the tokens: everything that they depend on except the
    request.
    """
    replayed_without_guarantee: bool = False
    """The request continued where equal tokens are not guaranteed: nothing is missing, but a rerun may differ."""
    replica_id: str = ""
    """Replica that computed the tokens."""
    key: SequenceKey = NO_SEQUENCE
    """Key by which the dispatch host finds the reader."""
    stop_reason: str | int | None = None
    """The stop string or the stop token of the request that has ended the sequence, if one has; on its last delta."""
    chat: ChatOutput | None = None
    """Chat output, for chats with tools or `split_reasoning`; set where the API reads them."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities; of whole completions with `logprobs`, `best_of` or `beam_width`."""
    pooled: bytes = b""
    """Result of a pooling request, float32, little-endian; on its only delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished request. With `best_of` and `beam_width` the completions are sorted, best first."""

    request_id: str
    model: str
    completions: tuple[OutputDelta, ...]
    """Each is a whole completion. The prompt's log-probabilities come with the first."""
    usage: Usage
    candidates: Sequence[Sequence[Sequence[tuple[int, float]]]] = ()
    """Only of a beam search, in the process that has made it: for each token of each completion, the likeliest
    (token id, logprob) at that position, best first."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Same as in `OutputDelta`."""
        return self.completions[0].prompt_logprobs if self.completions else ()

    @property
    def replayed_without_guarantee(self) -> bool:
        """Whether one of the completions was."""
        return any(one.replayed_without_guarantee for one in self.completions)

    @property
    def system_fingerprint(self) -> str:
        """Fingerprint of the first completion."""
        return self.completions[0].system_fingerprint if self.completions else ""
