"""Bytes on a connection to the HTTP port: the server's parser, its bounds, and whatever is behind them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.fuzz.targets.connections import said_to
from tests.fuzz.targets.json_bodies import running

HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
EVERY: Final = 64


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """Now and then the server is asked how it is."""
    with running() as application:
        address, num_read = application.place.router.http_address, 0

        def read(data: bytes) -> None:
            nonlocal num_read
            num_read += 1
            answer = application.run(said_to(address, data))
            for status in STATUS.findall(answer):
                assert int(status) != 500, answer[:500]
            assert b"fault of Holdfast's" not in answer, answer[:500]
            if num_read % EVERY == 1:
                application.post("/tokenize", b'{"prompt": "hello"}')

        yield read
