"""HTTP API of a router in this process, without a port: called as an ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message

from holdfast.cluster.client.batch_run import Body
from holdfast.router.api.http.app import HttpApi
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.requests.request_processor import RequestProcessor


class LocalApi:
    """Calls an application. A caller as `BatchRun` has one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(
        self, method: str, path: str, body: Body | None = None, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost"), (b"content-type", content_type.encode())],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }
        pieces = None if body is None else body()
        is_sent = False
        status, content = 0, bytearray()

        async def receive() -> Message:
            nonlocal is_sent
            if is_sent:
                await asyncio.Event().wait()  # a caller that does not leave
            piece = b"" if pieces is None else await anext(pieces, b"")
            is_sent = not piece
            return {"type": "http.request", "body": piece, "more_body": not is_sent}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, bytes(content)


@asynccontextmanager
async def local_api(
    processor: RequestProcessor, dispatch_host: DispatchHost, limits: LimitsConfig, config: RouterConfig
) -> AsyncIterator[LocalApi]:
    """The API with the store of the configuration, while the context is open."""
    api = HttpApi(processor, dispatch_host, limits, max_file_bytes=config.store_max_file_bytes)
    await api.open_store(config)
    try:
        yield LocalApi(api.app())
    finally:
        await api.leave_jobs()
        await api.history.close()
