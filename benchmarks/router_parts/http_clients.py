"""HTTP clients: as many streams at a time as ordered, which read events from a socket, and count them."""

import argparse
import asyncio
import json
import re
from typing import Any

from benchmarks.router_parts.clients import Streams
from benchmarks.router_parts.load import PROMPT
from benchmarks.router_parts.orders import run, say, take_orders

_END = b"data: [DONE]"


class HttpStreams(Streams):
    """Chats. Every event but the last is counted as a message, and as a token."""

    path = "/v1/chat/completions"

    async def read(self, num_tokens: int) -> None:
        host, port = self.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({**self.asked, "max_tokens": num_tokens, "stream": True}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        tail = b""
        while _END not in tail:
            data = await reader.read(2**16)
            if not data:
                raise ConnectionError(f"the server has closed a stream after {tail!r}")
            self.counts.messages += data.count(b"data: ")
            self.counts.tokens += self.num_tokens(data)
            tail = (tail + data)[-400:]
        self.counts.tokens += self.num_tokens_in_all(tail)
        writer.close()

    @property
    def asked(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": PROMPT}]}

    def num_tokens(self, data: bytes) -> int:
        """Those that arriving bytes are counted as."""
        return data.count(b"data: ")

    def num_tokens_in_all(self, tail: bytes) -> int:
        """Those that only the end of a stream tells."""
        return 0


class CompletionStreams(HttpStreams):
    """Completions, for models without a chat template. Tokens are counted by the usage, when a stream has ended."""

    path = "/v1/completions"

    @property
    def asked(self) -> dict[str, Any]:
        return {"prompt": PROMPT, "stream_options": {"include_usage": True}}

    def num_tokens(self, data: bytes) -> int:
        return 0

    def num_tokens_in_all(self, tail: bytes) -> int:
        (said,) = re.findall(rb'"completion_tokens":(\d+)', tail)
        return int(said)


async def main(address: str, *, completions: bool) -> None:
    streams = (CompletionStreams if completions else HttpStreams)(address)
    say()
    await take_orders(streams.carry_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of a server")
    parser.add_argument("--completions", action="store_true", help="ask for completions, not chats")
    arguments = parser.parse_args()
    run(main(arguments.address, completions=arguments.completions))
