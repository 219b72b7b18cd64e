"""Transport of an audit: performs its requests with httpx, within a budget of requests, tokens and rate."""

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from holdfast.cluster.verify.exchange import Answer, AnswerReader, Ask
from holdfast.worker.errors import ConfigurationError

_WRONG_KEY: Final = "wrong-key-of-an-audit"
_BUSY: Final = (429, 503)  # HTTP statuses
_MAX_WAIT_S: Final = 10.0
_CLOSED: Final = "RemoteProtocolError: Server disconnected without sending a response"
"""Error of httpx for a connection that ended before the first byte of an answer."""


class BudgetExceeded(Exception):
    """The next requests would cost more than the budget allows."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """Bounds of an audit."""

    num_requests: int = 1500
    num_tokens: int = 150_000
    """Output tokens that requests may cost, whether they are used or not."""
    rate: float = 50.0
    """Requests a second, on average; `burst` of them may be sent at once."""
    burst: int = 16
    seconds: float = math.inf
    """Time after which nothing more is asked."""
    used_requests: int = 0
    used_tokens: int = 0

    @classmethod
    def parsed(cls, text: str) -> "Budget":
        """Budget of `requests=300,tokens=20000,rate=5`, or of a number of requests. Raises `ConfigurationError`."""
        names = {"requests": "num_requests", "tokens": "num_tokens", "rate": "rate", "seconds": "seconds"}
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.rpartition("=")
            try:
                number = float(value) if name in ("rate", "seconds") else int(value)
            except ValueError:
                number = 0
            if name not in ("", *names) or number <= 0:
                raise ConfigurationError(
                    f"--budget {text}: {part!r} must be requests, tokens, rate or seconds, '=' and a number above 0"
                )
            values[names[name or "requests"]] = number
        return cls(**values)  # type: ignore[arg-type]

    def spend(self, asks: Sequence[Ask], after_s: float = 0.0) -> None:
        """Raises `BudgetExceeded`, and then spends nothing. `after_s`: seconds since the audit began."""
        tokens = sum(ask.num_tokens for ask in asks)
        if after_s > self.seconds:
            raise BudgetExceeded(f"the budget of {self.seconds:g} seconds is spent")
        if self.used_requests + len(asks) > self.num_requests:
            raise BudgetExceeded(f"the budget of {self.num_requests} requests is spent")
        if self.used_tokens + tokens > self.num_tokens:
            raise BudgetExceeded(f"the budget of {self.num_tokens} output tokens is spent")
        self.used_requests += len(asks)
        self.used_tokens += tokens


class Transport:
    """Connection to one server."""

    def __init__(
        self,
        url: str,
        key: str,
        budget: Budget,
        *,
        timeout_s: float = 300.0,
        inner: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        """`url` ends before the paths of the API, or before `/v1`.

        `inner` takes the place of a network, and `clock` that of its time.
        """
        self.base = base_url(url)
        self.budget = budget
        self._key, self._clock = key, clock
        self._began_s = clock()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=60.0), limits=limits, transport=inner, verify=tls, trust_env=False
        )
        self._allowance, self._at_s = float(budget.burst), time.monotonic()

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, asks: Sequence[Ask], on_first: Callable[[], None] = lambda: None) -> list[Answer]:
        """Sends them together. `on_first` is called at the first event of each. Raises `BudgetExceeded`."""
        self.budget.spend(asks, self._clock() - self._began_s)
        await self._wait(len(asks))
        return await asyncio.gather(*(self._patiently(ask, on_first) for ask in asks))

    async def _wait(self, number: int) -> None:
        """Waits until the rate allows this number of requests more."""
        now = time.monotonic()
        self._allowance = min(float(self.budget.burst), self._allowance + (now - self._at_s) * self.budget.rate)
        self._at_s = now
        self._allowance -= number
        if self._allowance < 0:
            await asyncio.sleep(-self._allowance / self.budget.rate)

    async def _patiently(self, ask: Ask, on_first: Callable[[], None]) -> Answer:
        """A server that is busy is asked once more, after the time that it names. So is one that closed the connection
        before its answer began: it may have closed an idle connection just as the request was sent.
        """
        answer, retry_s = await self._once(ask, on_first)
        if answer.error.startswith(_CLOSED):
            answer, retry_s = await self._once(ask, on_first)
        if answer.status in _BUSY and ask.is_valid:
            await asyncio.sleep(min(retry_s, _MAX_WAIT_S))
            answer, _ = await self._once(ask, on_first)
        return answer

    async def _once(self, ask: Ask, on_first: Callable[[], None]) -> tuple[Answer, float]:
        reader, began_s, retry_s = AnswerReader(ask), self._clock(), 1.0
        try:
            async with self._client.stream(ask.method, self._url(ask), **self._sent(ask)) as response:
                reader.answer.status = response.status_code
                retry_s = _seconds(response.headers.get("retry-after"))
                if ask.is_streamed and "event-stream" in response.headers.get("content-type", ""):
                    await self._read_events(response, reader, began_s, on_first)
                else:
                    reader.whole(await response.aread())
                    reader.answer.first_s = self._clock() - began_s
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            reader.answer.error = f"{type(error).__name__}: {error}".replace(self._key or "\x00", "KEY")
        reader.answer.total_s = self._clock() - began_s
        return reader.finished(), retry_s

    async def _read_events(
        self, response: httpx.Response, reader: AnswerReader, began_s: float, on_first: Callable[[], None]
    ) -> None:
        cut = reader.answer.ask.cut_after
        async for data in response.aiter_bytes():
            before = reader.answer.num_events
            reader.feed(data)
            if not before and reader.answer.num_events:
                reader.answer.first_s = self._clock() - began_s
                on_first()
            if cut is not None and reader.answer.num_events >= cut:
                return

    def _url(self, ask: Ask) -> str:
        return f"{self.base.removesuffix('/v1')}{ask.path}" if ask.path.startswith("/") else f"{self.base}/{ask.path}"

    def _sent(self, ask: Ask) -> dict[str, Any]:
        key = _WRONG_KEY if ask.has_wrong_key else self._key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if isinstance(ask.body, bytes):
            return {"content": ask.body, "headers": headers | {"content-type": "application/json"}}
        return {"json": ask.body, "headers": headers} if ask.body is not None else {"headers": headers}


def base_url(url: str) -> str:
    """`http://host:port/v1`; a path of one's own stays. Raises `ConfigurationError`."""
    parsed = httpx.URL(url if "://" in url else f"http://{url}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"URL {url!r}: must be http://HOST:PORT or https://...")
    if parsed.userinfo:
        raise ConfigurationError("URL: must not have a name and password: give the key with --key-file")
    text = str(parsed.copy_with(query=None, fragment=None)).rstrip("/")
    return text if parsed.path.strip("/") else f"{text}/v1"


def _seconds(header: str | None) -> float:
    try:
        return float(header) if header else 1.0
    except ValueError:
        return 1.0
