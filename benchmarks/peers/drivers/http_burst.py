"""A server behind HTTP, as drivers ask it: started as a child, given each burst as streamed completions, all at once.

The client is this process: what it takes of the cores, the server cannot have, as with any client on the same machine.
Runs in every peer's environment: nothing but the standard library may be imported here.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

from line_server import Output, Prompts, Sampling, split_at

_START_S = 400.0
_END = b"data: [DONE]"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_server(command: Sequence[str], port: int, health: str = "/health") -> None:
    """Starts a child and returns when it is healthy. It ends with this process's group."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            sys.exit(f"the server has ended ({child.returncode}): {' '.join(command)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"the server was not healthy after {_START_S:.0f} s: {' '.join(command)}")


class HttpServer:
    """Answers a burst by as many streams of `/v1/completions` as it has prompts. `apis`: its addresses by protocol."""

    def __init__(self, port: int, model: str, **apis: str) -> None:
        self._port, self._model = port, model
        self.apis = {"http": f"http://127.0.0.1:{port}", **apis}

    def __call__(self, prompts: Prompts, max_tokens: int, split: bool, sampling: Sampling) -> Output:
        return asyncio.run(_burst(self._port, self._model, prompts, max_tokens, sampling))


async def _burst(port: int, model: str, prompts: Prompts, max_tokens: int, sampling: Sampling) -> Output:
    started_s = time.perf_counter()
    bodies = [_body(model, ids, max_tokens, sampling, seed) for seed, ids in enumerate(prompts)]
    streams = await asyncio.gather(*(_stream(port, body) for body in bodies))
    total_s = time.perf_counter() - started_s
    return Output([ids for ids, _ in streams], split_at(max(first_s for _, first_s in streams) - started_s, total_s))


def _body(model: str, prompt: list[int], max_tokens: int, sampling: Sampling, seed: int) -> bytes:
    given = {"temperature": 0.0, **sampling, **({"seed": seed} if sampling else {})}
    if "logprobs" in given:
        given["logprobs"] = int(given["logprobs"])
    if "json_schema" in given:
        given["structured_outputs"] = {"json": json.loads(given.pop("json_schema"))}
    asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return json.dumps({**asked, "return_token_ids": True, **given}).encode()


async def _stream(port: int, body: bytes) -> tuple[list[int], float]:
    """The ids of one stream, and when its first ones came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    ids: list[int] = []
    first_s = 0.0
    while True:
        line = await reader.readline()
        if line.startswith(_END):
            break
        if not line:
            raise ConnectionError("the server has closed a stream")
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            for choice in event["choices"]:
                ids += choice.get("token_ids") or ()
            first_s = first_s or (time.perf_counter() if ids else 0.0)
        elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise RuntimeError(f"{line.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
    writer.close()
    return ids, first_s
