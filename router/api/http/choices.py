"""Choices of OpenAI-style responses: log-probabilities, usage and finish reasons as clients read them.

Pure functions of the router's deltas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from holdfast.router.api.public_answer import by_token_id, logprob_of
from holdfast.router.generation import OutputDelta, Usage
from holdfast.router.text.token_table import TokenTable
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, CallEvent, Content
from holdfast.router.tools.chat_style import ChatReader, Reasoning
from holdfast.worker.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Form of a response's tokens: texts, or `token_id:7` on request."""

    tokens: TokenTable
    are_ids: bool = False

    def in_chat(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.are_ids else self.tokens.text_of(token_id)

    def in_completion(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.are_ids else self.tokens.name_of(token_id)

    def keys(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A different name for each token, for objects that have tokens as their keys."""
        if self.are_ids:
            return {token_id: f"token_id:{token_id}" for token_id in token_ids}
        return self.tokens.distinct_names(token_ids)


def num_reasoning_tokens(readers: Iterable[ChatReader | None]) -> int | None:
    """Reasoning tokens of all choices; None if they cannot be counted."""
    counts = [reader.num_reasoning_tokens for reader in readers if reader is not None]
    numbers = [number for number in counts if number is not None]
    return sum(numbers) if numbers else None


def usage_of(usage: Usage, num_thoughts: int | None = None) -> dict[str, Any]:
    """The usage object. Details of the prompt are null where nothing of it was cached, as clients of vLLM expect.
    `num_thoughts`: tokens of the reasoning, where they are counted.
    """
    details = ({} if num_thoughts is None else {"reasoning_tokens": num_thoughts}) | drafts_of(usage)
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": cached_of(usage) if usage.num_cached_tokens else None,
        **({"completion_tokens_details": details} if details else {}),
        **times_of(usage),
    }


def cached_of(usage: Usage) -> dict[str, int]:
    """Cached tokens of the prompt, and those of them that came from the disk where that is known."""
    on_disk = {} if usage.figures is None else {"disk_tokens": usage.figures.num_disk_tokens}
    return {"cached_tokens": usage.num_cached_tokens, **on_disk}


def drafts_of(usage: Usage) -> dict[str, int]:
    """Guessed tokens that came true and that did not, by OpenAI's names; nothing where none was guessed."""
    figures = usage.figures
    if figures is None or not figures.num_draft_tokens:
        return {}
    num_accepted = figures.num_accepted_tokens
    return {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": figures.num_draft_tokens - num_accepted,
    }


def times_of(usage: Usage) -> dict[str, float]:
    """Times of a request in seconds, by the names that Groq's API gives them in its usage, and its attempts."""
    if (figures := usage.figures) is None:
        return {}
    times = {
        "queue_time": figures.queue_s,
        "prompt_time": figures.prompt_s,
        "time_to_first_token": figures.first_token_s,
        "completion_time": figures.decode_s,
        "total_time": figures.total_s,
    }
    return {name: round(seconds, 6) for name, seconds in times.items()} | {"attempts": figures.num_attempts}


def finish_of(reason: FinishReason | None) -> str | None:
    """The finish reason in OpenAI's words, which do not include an abort."""
    return None if reason is None else "stop" if reason is FinishReason.ABORT else str(reason)


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any] | None:
    """The logprobs object of a chat's choice; null where none are asked for."""
    if not logprobs:
        return None
    return {"content": listed_logprobs(logprobs, names), "refusal": None}


def listed_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> list[dict[str, Any]]:
    """Log-probabilities of each token: itself and the best ones."""
    return [
        {
            **_named(item.token_id, item.logprob, names),
            "top_logprobs": [_named(token_id, logprob, names) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]


def _named(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    written = list(names.tokens.bytes_of(token_id))
    return {"token": names.in_chat(token_id), "logprob": logprob_of(logprob), "bytes": written}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None],
    names: TokenNames,
    *,
    text_offsets: Sequence[int],
    first_token_id: int = 0,
) -> dict[str, Any] | None:
    """The logprobs object of a completion's choice. `None` among them is the first token of a prompt,
    `first_token_id`, of which nothing can be said. `text_offsets` has one for each.
    """
    if not logprobs:
        return None
    return {
        "tokens": [names.in_completion(first_token_id if item is None else item.token_id) for item in logprobs],
        "token_logprobs": [None if item is None else logprob_of(item.logprob) for item in logprobs],
        "top_logprobs": [None if item is None else _best(item, names) for item in logprobs],
        "text_offset": list(text_offsets),
    }


def _best(item: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens and the token itself, by text."""
    said = dict(item.top)
    said.setdefault(item.token_id, item.logprob)
    keys = names.keys(said)
    return {keys[token_id]: logprob_of(logprob) for token_id, logprob in said.items()}


def prompt_logprobs_of(logprobs: Sequence[TokenLogprob | None], tokens: TokenTable) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by prompt position, null for the first, entries by token id."""
    return [None if item is None else by_token_id(item, tokens) for item in logprobs or (None,)]


Kind: TypeAlias = Literal["text", "thinking", "call"]


@dataclass(slots=True)
class Block:
    """One block so far."""

    kind: Kind
    index: int
    """Among the blocks of the output."""
    name: str = ""
    """Name of a called function."""
    call_index: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of a text's tokens."""

    @property
    def text(self) -> str:
        """Text, thoughts, or a call's arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Event of a block: begin, piece, or end."""

    what: Literal["begin", "more", "end"]
    block: Block
    piece: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the tokens that came with this piece of text."""


class Blocks:
    """The blocks of one output, as it comes."""

    def __init__(self, reader: ChatReader | None) -> None:
        """Treats everything as text if there is no reader."""
        self._reader = reader
        self._current: Block | None = None
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self.blocks: list[Block] = []

    @property
    def num_calls(self) -> int:
        return 0 if self._reader is None else self._reader.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return num_reasoning_tokens([self._reader]) or 0

    def push(self, delta: OutputDelta) -> Iterator[BlockEvent]:
        """Events of a delta. At the end all blocks are closed, and there is at least one."""
        self._logprobs += delta.logprobs
        for event in self._read(delta):
            if isinstance(event, Reasoning):
                self._logprobs.clear()
                yield from self._more("thinking", event.text)
            elif isinstance(event, Content):
                yield from self._more("text", event.text, self._of_text())
            elif isinstance(event, CallBegin):
                self._logprobs.clear()
                yield from self._begin("call", event.name, event.index)
            elif isinstance(event, CallArguments):
                yield from self._more("call", event.json)
            elif isinstance(event, CallEnd):
                yield from self._end()
        if delta.finish_reason is not None:
            if not self.blocks:
                yield from self._begin("text")
            yield from self._end()

    def _read(self, delta: OutputDelta) -> Iterable[Reasoning | CallEvent]:
        if self._reader is None:
            return [Content(delta.text)] if delta.text else []
        read = self._reader.push(delta.text, delta.token_ids)
        return read + self._reader.finish() if delta.finish_reason is not None else read

    def _of_text(self) -> Sequence[TokenLogprob]:
        """Log-probabilities that came with this delta, and with earlier deltas without text, once."""
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _more(self, kind: Kind, piece: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[BlockEvent]:
        if not piece:
            return
        if self._current is None or self._current.kind != kind:
            yield from self._begin(kind)
        assert self._current is not None, "a block has begun"
        self._current.pieces.append(piece)
        self._current.logprobs += logprobs
        yield BlockEvent("more", self._current, piece, logprobs)

    def _begin(self, kind: Kind, name: str = "", call_index: int = 0) -> Iterator[BlockEvent]:
        yield from self._end()
        self._current = Block(kind, len(self.blocks), name, call_index)
        self.blocks.append(self._current)
        yield BlockEvent("begin", self._current)

    def _end(self) -> Iterator[BlockEvent]:
        block, self._current = self._current, None
        if block is not None:
            yield BlockEvent("end", block)


def finish_after_calls(reason: FinishReason | None, reader: ChatReader | None) -> str | None:
    """The finish reason, which is `tool_calls` for an output that ended by itself and has calls."""
    if reason is FinishReason.STOP and reader is not None and reader.num_calls:
        return "tool_calls"
    return finish_of(reason)


def delta_of(prefix: str, event: Reasoning | CallEvent) -> dict[str, Any]:
    """Chunk fields for an event; empty for the end of a call."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, CallBegin):
        return {"tool_calls": [_call(prefix, event.index, event.name, "")]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]}
    return {}


def whole_message(prefix: str, events: Iterable[Reasoning | CallEvent]) -> dict[str, Any]:
    """The fields of a message that an output's events fill."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            calls.append(_call(prefix, event.index, event.name, ""))
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.json
    message: dict[str, Any] = {"content": content or (None if calls else "")}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return message


def _call(prefix: str, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"{prefix}_{index}", "type": "function", "function": function}
