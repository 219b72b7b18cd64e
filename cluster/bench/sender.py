"""Sender of requests: the protocol's interface to the driver, and the result of a request. Plain data."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.tls import Tls


class OnPiece(Protocol):
    """Callback for each piece of output."""

    def __call__(self, *, is_silent_end: bool = False) -> None:
        """A piece of output has come: one token or several. `is_silent_end`: the end of the output, without text."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `texts` alternate between user and model; the last is the user's."""

    texts: Sequence[str]
    num_output_tokens: int

    @property
    def prompt(self) -> str:
        """The prompt, for a protocol without conversations."""
        return "\n".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete response."""

    text: str = ""
    num_output_tokens: int | None = None
    """Output tokens as counted by the server; None: the server reports no count, and pieces are counted instead."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the server had in its caches; None: it does not say."""


class SendFailed(Exception):
    """A request was not answered to the end. `kind` groups failures in reports."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Sender(Protocol):
    """Sends requests to one server, on one event loop."""

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        """Raises `SendFailed`. Cancelling it gives the request up."""

    async def close(self) -> None: ...


_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class EventReader:
    """Reader of the events of one response. A piece is an event with text, reasoning or tool calls: what users see
    first, and what TTFT means.

    An output that ends with a token without text, such as an end-of-sequence token, is over at that token's event.
    """

    def __init__(self, on_piece: OnPiece) -> None:
        self._on_piece = on_piece
        self._rest = b""
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._is_over = False

    def feed(self, data: bytes) -> None:
        """Raises `SendFailed` where the server says an error, or something that is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip())

    def reply(self) -> Reply:
        """When the stream has ended. Raises `SendFailed` if it was cut off."""
        if not self._is_over:
            raise SendFailed("cut off", "the stream ended before the answer did")
        return Reply(
            text="".join(self._texts),
            num_output_tokens=self._usage.get("completion_tokens"),
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def _event(self, data: bytes) -> None:
        if data == _DONE:
            self._is_over = True
            return
        try:
            event = json.loads(data)
            error = event.get("error")
            choices = event.get("choices") or ()
        except (ValueError, AttributeError):
            raise SendFailed("unreadable", f"an event that is not a JSON object: {data[:80]!r}") from None
        if error:
            raise SendFailed("error in the stream", message_of(event))
        self._usage = event.get("usage") or self._usage
        for choice in choices:
            if text := _text_of(choice):
                self._texts.append(text if isinstance(text, str) else "")
                self._on_piece()
            if choice.get("finish_reason") is not None:
                self._is_over = True
                if not text:
                    self._on_piece(is_silent_end=True)


def _text_of(choice: dict[str, Any]) -> Any:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")


def message_of(body: Any) -> str:
    """The message of an OpenAI-style error body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


class HttpSender:
    """Each request in flight has a connection, which the next one takes over."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        is_chat: bool,
        params: Mapping[str, Any],
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        """`base_url` ends before the paths of the API: `http://localhost:8000/v1`. `params` go into each body."""
        self.model = model
        self._url = f"{base_url}/{'chat/completions' if is_chat else 'completions'}"
        self._models_url = f"{base_url}/models"
        self._is_chat = is_chat
        self._params = dict(params)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls.client_context() if tls is not None else True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            read_bufsize=2**18,
        )

    async def choose_model(self) -> str:
        """The given model, or else the first one that the server names. Raises `ConfigurationError`."""
        if not self.model:
            try:
                async with self._session.get(self._models_url) as response:
                    if response.status != 200:
                        raise ValueError(f"it answers {response.status}")
                    self.model = str((await response.json(content_type=None))["data"][0]["id"])
            except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                reason = f"{self._models_url} does not name the models: {error}; say --model NAME, or is it down?"
                raise ConfigurationError(reason) from error
        return self.model

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        reader = EventReader(on_piece)
        try:
            async with self._session.post(self._url, data=self._body(ask)) as response:
                if response.status != 200:
                    raise SendFailed(f"HTTP {response.status}", await _refusal(response))
                async for data in response.content.iter_any():
                    reader.feed(data)
        except aiohttp.ClientConnectorError as error:
            raise SendFailed("no connection", str(error)) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise SendFailed("connection lost", f"{type(error).__name__}: {error}") from error
        return reader.reply()

    async def close(self) -> None:
        await self._session.close()

    def _body(self, ask: Ask) -> bytes:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": ask.num_output_tokens, "stream": True}
        if self._is_chat:
            roles = ("user", "assistant")
            asked["messages"] = [{"role": roles[n % 2], "content": text} for n, text in enumerate(ask.texts)]
        else:
            asked["prompt"] = ask.prompt
        asked["stream_options"] = {"include_usage": True}
        return json.dumps(asked | self._params).encode()


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        return message_of(json.loads(text))[:300]
    except ValueError:
        return text[:300]
