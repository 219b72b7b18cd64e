"""Responses of the public API as plain data: stream chunks and whole generations. Fields are named as in the proto."""

from dataclasses import dataclass

from holdfast.router.events import Usage
from holdfast.worker.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. `arguments` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What is new of a call. `id` and `name` are set where it begins; pieces of `arguments` follow each other."""

    index: int
    """Counts the calls of one completion, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What new text of a chat's answer says."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """What the text of a chat's answer says."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New output of one completion. Its chunks follow each other without gap or overlap."""

    request_id: str
    sequence_index: int = 0
    """Which of the request's completions it belongs to."""
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """Set on the last chunk of a completion."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each prompt token, None for the first, where the request asks for them and the prompt has more than one;
    on the first chunk alone."""
    usage: Usage | None = None
    """Set on the very last chunk."""
    chat: ChatDelta | None = None
    """What the new text says, for chats with tools or `split_reasoning`."""
    replayed_without_guarantee: bool = False
    """The request continued where equal tokens are not guaranteed: nothing is missing, but a rerun may differ."""
    system_fingerprint: str = ""
    """Identifies everything that the tokens depend on, except the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSequence:
    """One completion as a whole."""

    sequence_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """None only if the server sent a reason that is not known here."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities; set with `logprobs`, `best_of` and `beam_width`."""
    chat: ChatOutput | None = None
    """What the text says, for chats with tools or `split_reasoning`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The whole response. With `best_of` and `beam_width` the completions are sorted, best first."""

    request_id: str
    model: str
    completions: tuple[GeneratedSequence, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each prompt token, None for the first, as in `Chunk`."""
    replayed_without_guarantee: bool = False
    """As in `Chunk`."""
    system_fingerprint: str = ""
    """As in `Chunk`."""
