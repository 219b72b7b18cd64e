"""Clients of HTTP in one process: each reads a stream of events from a socket, and counts them."""

import argparse
import asyncio
import json

from benchmarks.router_parts.clients import Streams
from benchmarks.router_parts.load import PROMPT
from benchmarks.router_parts.orders import obey, run, say

_END = b"data: [DONE]"


class HttpStreams(Streams):
    """Chats. Every event but the last is counted as a message, and as a token."""

    async def read(self, num_tokens: int) -> None:
        host, port = self.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": num_tokens, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        tail = b""
        while _END not in tail:
            data = await reader.read(2**16)
            if not data:
                raise ConnectionError(f"the server has closed a stream after {tail!r}")
            self.counts.messages += data.count(b"data: ")
            self.counts.tokens += data.count(b"data: ")
            tail = (tail + data)[-200:]
        writer.close()


async def main(address: str) -> None:
    streams = HttpStreams(address)
    say()
    await obey(streams.obey)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of a server")
    run(main(parser.parse_args().address))
