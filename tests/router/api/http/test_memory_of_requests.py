"""What a request over HTTP held is freed once it has ended, however it ends, without the garbage collector."""

import asyncio
import json

import pytest

from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.site import site
from tests.router.traced_memory import check_freed, traced

__all__ = ["traced"]  # a fixture

TEXT = "x" * 400_000
SHORT = "x" * 60_000


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


CASES = {
    "a wrong field after the text": ("/v1/chat/completions", chat(TEXT, temperature=-1), 400),
    "an unknown type": ("/v1/chat/completions", chat(TEXT, n="many"), 400),
    "an unknown model": ("/v1/chat/completions", chat(TEXT) | {"model": "other"}, 404),
    "a schema that is refused": (
        "/v1/chat/completions",
        chat(SHORT, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x" * 9}}}),
        400,
    ),
    "too many tokens": ("/v1/completions", {"model": "fake", "prompt": TEXT}, 400),
    "a deadline": ("/v1/completions", {"model": "fake", "prompt": SHORT, "max_tokens": 2000, "timeout": 0.05}, 504),
    "messages": ("/v1/messages", chat(TEXT, max_tokens=5, temperature=-1), 400),
    "responses": ("/v1/responses", {"model": "fake", "input": TEXT, "temperature": -1}, 400),
    "tokenize": ("/tokenize", {"model": "other", "prompt": TEXT}, 404),
    "an answer": ("/v1/completions", {"model": "fake", "prompt": SHORT, "max_tokens": 2}, 200),
}


async def status_of(address: str, path: str, body: bytes) -> int:
    """One request on a connection of its own. Returns the status of the answer, which is read to its end."""
    host, port = address.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("path", "body", "status"), CASES.values(), ids=CASES)
@on_a_loop
async def test_what_a_request_held_is_freed(path, body, status):
    sent = json.dumps(body).encode()
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=lambda at: byte_tokenizer(at, TEMPLATE), http=True) as place:
        address = place.router.http_address

        async def call() -> None:
            assert await status_of(address, path, sent) == status

        await check_freed(call, len(sent))
