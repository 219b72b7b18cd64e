"""JSON bodies of every HTTP route, through the whole application of a router that has a replica."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from holdfast.router.api.http.openapi import description
from holdfast.router.config import LimitsConfig
from holdfast.router.operator_state import NO_OPERATOR_STATE, Change, OperatorState
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import runner
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.site import Site, site

PATHS: Final = tuple(sorted(path for path, methods in description()["paths"].items() if "post" in methods))
DOCUMENTED: Final = frozenset((200, 400, 401, 403, 404, 409, 413, 415, 421, 422, 429, 503, 504))
ANSWER_S: Final = 20.0
MAX_ERROR: Final = 8192
"""Bytes of an error's body, however long the request is."""


class Application:
    """The HTTP application of a router, called as its server calls it."""

    def __init__(self, loops: asyncio.Runner, place: Site) -> None:
        self._loops = loops
        self.place = place
        self.app = place.router._http_api.app()

    def post(self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Sends a request, and checks its answer."""
        self._loops.run(self._checked(path, body, headers))

    def run(self, work: Any) -> Any:
        return self._loops.run(work)

    async def _checked(self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        status, answer = await asyncio.wait_for(self._answer(path, body, headers), ANSWER_S)
        assert status in DOCUMENTED, f"{path}: {status} {answer[:500]!r}"
        assert b"fault of Holdfast's" not in answer, f"{path}: {answer[:500]!r}"
        assert status == 200 or len(answer) <= MAX_ERROR, f"{path}: an error of {len(answer)} bytes"

    async def _answer(self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            return await asyncio.Future()  # the client stays

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            else:
                parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        assert len(statuses) == 1, f"{path}: {len(statuses)} answers"
        return statuses[0], b"".join(parts)


@contextmanager
def running() -> Iterator[Application]:
    """A router with a fake replica on a loop of this thread. Leaving it checks that nothing is left over."""
    with runner() as loops:
        loop, over = loops.get_loop(), asyncio.Event()
        ready: asyncio.Future[Site] = loop.create_future()
        holding = loop.create_task(_hold(ready, over))
        loop.run_until_complete(asyncio.wait([ready, holding], return_when=asyncio.FIRST_COMPLETED))
        if holding.done():
            holding.result()
        yield Application(loops, ready.result())
        over.set()
        loop.run_until_complete(holding)


async def _hold(ready: "asyncio.Future[Site]", over: asyncio.Event) -> None:
    """One task for all that a site does, which looks for tasks that are left."""
    replica = await FakeReplica.start(step_s=0.0)
    replica.max_model_len = 64
    limits = LimitsConfig(max_message_bytes=2**20, default_timeout_s=10.0)
    load = lambda path: byte_tokenizer(path, TEMPLATE)  # noqa: E731
    async with site(replica, load_tokenizer=load, limits=limits, http=True, send_change=_obey_nothing) as place:
        ready.set_result(place)
        await over.wait()


async def _obey_nothing(change: Change) -> OperatorState:
    """What operators order is not done: inputs must not depend on those before them."""
    return NO_OPERATOR_STATE


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte chooses a route, the rest is the body."""
    with running() as application:

        def read(data: bytes) -> None:
            number = data[0] if data else 0
            application.post(PATHS[number % len(PATHS)], data[1:])

        yield read
