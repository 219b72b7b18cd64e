"""Sender over HTTP: completions and chats in OpenAI's form, streamed, to whichever server speaks it.

What may not live here: the events of an answer (`event_reader.py`).
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from holdfast.cluster.bench.event_reader import EventReader, message_of
from holdfast.cluster.bench.sender import Ask, OnPiece, Reply, SendFailed
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.security.tls import Tls


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
        """The first one that the server names, where none was. Raises `ConfigurationError`."""
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
        asked: dict[str, Any] = {"model": self.model, "max_tokens": ask.max_tokens, "stream": True}
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
