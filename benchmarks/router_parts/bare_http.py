"""Bare HTTP server: Starlette on uvicorn, and nothing else. It sends prepared chunks to every stream, one a step."""

import argparse
import json
from collections.abc import AsyncIterator
from functools import cache

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.router_parts.bare_server import Steps
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.router.api.http.server import HttpServer


@cache
def prepared(num_tokens: int) -> list[bytes]:
    head = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "demo"}
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    chunk = {**head, "system_fingerprint": "0" * 16, "choices": [choice]}
    return [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"] * num_tokens


async def main(steps_per_s: float) -> None:
    steps = Steps(steps_per_s)

    async def chunks(num_tokens: int) -> AsyncIterator[bytes]:
        began = steps.num
        for index, chunk in enumerate(prepared(num_tokens)):
            await steps.after(began + index)
            yield chunk
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        asked = await request.json()
        return StreamingResponse(chunks(asked["max_tokens"]), media_type="text/event-stream")

    server = HttpServer(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]), "127.0.0.1", 0)
    await server.start()
    say(address=f"127.0.0.1:{server.port}")
    await until_the_end()
    await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps_per_s", type=float)
    arguments = parser.parse_args()
    run(main(arguments.steps_per_s))
