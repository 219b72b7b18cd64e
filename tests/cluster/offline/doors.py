"""Doors of an `LLM` in this process: the HTTP and the gRPC API of a router, over its pipeline."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from holdfast import LLM
from holdfast.router.api.grpc.server import SERVICE, InferenceServicer, build_server
from holdfast.router.api.http.app import HttpApi
from holdfast.router.api.http.server import HttpServer
from holdfast.router.config import LimitsConfig, RouterConfig


@contextmanager
def http_of(llm: LLM) -> Iterator[httpx.Client]:
    """A client of its HTTP API."""
    router = llm._engine._router
    processor = router._processor

    async def serve() -> HttpServer:
        server = HttpServer(HttpApi(processor, processor._dispatch_host, LimitsConfig()).app(), "127.0.0.1", 0)
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(serve(), router._loop).result(20)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
        yield client
    asyncio.run_coroutine_threadsafe(server.stop(1.0), router._loop).result(20)


@contextmanager
def grpc_of(llm: LLM) -> Iterator[str]:
    """Address of its gRPC API."""
    router = llm._engine._router
    processor = router._processor

    async def serve():
        servicer = InferenceServicer(processor, processor._dispatch_host)
        server = build_server({SERVICE: servicer}, RouterConfig(), LimitsConfig())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(serve(), router._loop).result(20)
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(1.0), router._loop).result(20)
