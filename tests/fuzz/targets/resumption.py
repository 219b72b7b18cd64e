"""Resumption of HTTP streams: a client's record, at the router, and the marks of a stream, at the client."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.cluster.client.resumable_call import HeldCall, error_event
from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.router.config import LimitsConfig
from holdfast.router.resume import Identity
from holdfast.router.wire.resume_codec import HOLD, RESUME, read_resume_json
from tests.fuzz.refusals import refused
from tests.fuzz.targets.json_bodies import Application, running

BODY = b'{"prompt": "hello", "max_tokens": 8, "stream": true, "seed": 1}'


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte says who reads the rest: a router, whose answer is checked, or a client."""
    with running() as application:

        def read(data: bytes) -> None:
            what, content = data[:1], data[1:]
            if what and what[0] % 2:
                as_client(content)
            else:
                as_router(application, content)

        yield read


def as_router(application: Application, content: bytes) -> None:
    with refused():
        record = read_resume_json(content, LimitsConfig().max_prompt_tokens)
        record.part(0, 4)
    headers = [(HOLD.encode(), b"2"), (RESUME.encode(), b"%d" % len(content))]
    application.post("/v1/completions", BODY + content, headers)


def as_client(content: bytes) -> None:
    """Half of the bytes after the first come in another piece."""
    policy = RetryPolicy(num_routers=2, connect_s=5, reconnect_s=60, timeout_s=None, draw=lambda: 0.5, now=0.0)
    call = HeldCall(BODY, policy, now=0.0)
    hold, _, stream = content.partition(b"\n")
    with refused():
        identity = Identity.of(hold.decode("latin-1"))
        call.verdict(200, hold.decode("latin-1"), None)
        if identity is None:
            return
        middle = len(stream) // 2
        for piece in (stream[:middle], stream[middle:]):
            call.push(piece)
        call.submission(1.0)
    error_event(stream)
