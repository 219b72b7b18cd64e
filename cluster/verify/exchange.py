"""Exchange with an audited server: requests, and answers read from JSON or from server-sent events."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_OK: Final = 200  # HTTP status
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. A body of bytes is sent as it is."""

    path: str
    """Path below the base URL (`completions`), or below what stands before its `/v1` if it begins with a slash."""
    body: Mapping[str, Any] | bytes | None = None
    method: str = "POST"
    cut_after: int | None = None
    """Close the connection after this number of events of a stream; None: read to the end."""
    is_valid: bool = True
    """Whether a correct server must answer it without an internal error."""
    has_wrong_key: bool = False

    @property
    def params(self) -> Mapping[str, Any]:
        return self.body if isinstance(self.body, Mapping) else {}

    @property
    def is_streamed(self) -> bool:
        return bool(self.params.get("stream"))

    @property
    def num_tokens(self) -> int:
        """Most output tokens that it may cost."""
        return int(self.params.get("max_tokens") or 0) * int(self.params.get("n") or 1)


@dataclass(slots=True, kw_only=True)
class Token:
    """An output token with its log-probability, in nats, and those of the likeliest ones at its position."""

    text: str
    logprob: float | None
    top: Sequence[tuple[str, float | None]] = ()


@dataclass(slots=True, kw_only=True)
class Call:
    """A tool call, as it was put together."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One completion of an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_finishes: int = 0
    tokens: list[Token] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """Texts of its events, if it was streamed."""
    calls: list[Call] = field(default_factory=list)

    @property
    def full(self) -> str:
        """All that the model wrote: thoughts, text, calls."""
        calls = "".join(f"\x00{call.name}({call.arguments})" for call in self.calls)
        return f"{self.reasoning}\x00{self.text}{calls}" if self.reasoning or calls else self.text


@dataclass(slots=True, kw_only=True)
class Answer:
    """Response to a request. `status` 0: no answer, for the reason in `error`."""

    ask: Ask
    status: int = 0
    error: str = ""
    body: Any = None
    choices: list[Choice] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    fingerprint: str = ""
    """`system_fingerprint`, of the last event that has one."""
    num_events: int = 0
    is_done: bool = False
    """Whether a stream ended with its mark."""
    problems: list[str] = field(default_factory=list)
    """Parts that are no JSON, no UTF-8 or no event."""
    num_not_finite: int = 0
    first_s: float = 0.0
    """Seconds to the first event, or to the answer."""
    total_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.status == _OK and not self.error and bool(self.choices)

    @property
    def choice(self) -> Choice:
        return self.choices[0]

    @property
    def message(self) -> str:
        """Text of an error, shortened."""
        found = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        found = found.get("message", found) if isinstance(found, dict) else found
        return str(self.error or found or "")[:300]

    def tokens_of(self, kind: str) -> int | None:
        """`prompt` or `completion` tokens by its usage; None: not reported."""
        value = self.usage.get(f"{kind}_tokens")
        return value if isinstance(value, int) else None


class AnswerReader:
    """Reader of one response. It never raises: what cannot be read is among the answer's problems."""

    def __init__(self, ask: Ask) -> None:
        self.answer = Answer(ask=ask)
        self._rest = b""
        self._choices: dict[int, Choice] = {}

    def whole(self, data: bytes) -> None:
        """A body in one piece."""
        body = self._json(data)
        self.answer.body = body
        if isinstance(body, dict) and self.answer.status == _OK:
            self._take(body)

    def feed(self, data: bytes) -> None:
        """A part of an event stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip())

    def finished(self) -> Answer:
        """The answer, once the body has ended."""
        if self._rest.startswith(_DATA):
            self._event(self._rest[len(_DATA) :].strip())
        self.answer.choices = [self._choices[index] for index in sorted(self._choices)]
        return self.answer

    def _event(self, data: bytes) -> None:
        if data == _DONE:
            self.answer.is_done = True
            return
        event = self._json(data)
        if not isinstance(event, dict):
            return
        self.answer.num_events += 1
        if event.get("error"):
            self.answer.body, self.answer.error = event, f"an error within the stream: {event['error']}"[:300]
        self._take(event)

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode(), parse_constant=self._not_finite)
        except UnicodeDecodeError as error:
            self.answer.problems.append(f"bytes that are not UTF-8: {error.reason} at {error.start}")
        except ValueError:
            if self.answer.status == _OK:
                self.answer.problems.append(f"text that is not JSON: {data[:80]!r}")
        return None

    def _not_finite(self, name: str) -> float:
        self.answer.num_not_finite += 1
        return float(name.replace("Infinity", "inf"))

    def _take(self, body: Mapping[str, Any]) -> None:
        if isinstance(body.get("usage"), dict):
            self.answer.usage = body["usage"]
        if isinstance(body.get("id"), str):
            self.answer.ids.add(body["id"])
        self.answer.fingerprint = str(body.get("system_fingerprint") or self.answer.fingerprint)
        for position, entry in enumerate(body.get("choices") or ()):
            if isinstance(entry, dict):
                index = entry.get("index", position)
                self._merge(self._choices.setdefault(index if isinstance(index, int) else position, Choice()), entry)

    def _merge(self, choice: Choice, entry: Mapping[str, Any]) -> None:
        said = entry.get("delta") or entry.get("message") or {"content": entry.get("text")}
        text = said.get("content")
        if isinstance(text, list):  # parts
            text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
        if text:
            choice.text += text
            choice.pieces.append(text)
        choice.reasoning += said.get("reasoning_content") or said.get("reasoning") or ""
        for position, call in enumerate(said.get("tool_calls") or ()):
            _merge_call(choice.calls, call.get("index", position), call.get("function") or {})
        if entry.get("finish_reason") is not None:
            choice.finish_reason = str(entry["finish_reason"])
            choice.num_finishes += 1
        if isinstance(entry.get("logprobs"), dict):
            choice.tokens += _tokens(entry["logprobs"])


def _merge_call(calls: list[Call], index: int, function: Mapping[str, Any]) -> None:
    while len(calls) <= index:
        calls.append(Call())
    calls[index].name += function.get("name") or ""
    arguments = function.get("arguments") or ""
    calls[index].arguments += arguments if isinstance(arguments, str) else json.dumps(arguments)


def _tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    """Tokens of either form: a chat's list of objects, or parallel lists of a completion."""
    if isinstance(logprobs.get("content"), list):
        return [
            Token(
                text=str(one.get("token", "")),
                logprob=one.get("logprob"),
                top=[(str(top.get("token", "")), top.get("logprob")) for top in one.get("top_logprobs") or ()],
            )
            for one in logprobs["content"]
        ]
    texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return [
        Token(text=str(text), logprob=value, top=list((top or {}).items()))
        for text, value, top in zip(texts, values, tops, strict=False)
    ]
