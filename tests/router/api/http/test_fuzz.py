"""Requests that no client would send: bodies beside their schemas, and bytes that are hardly HTTP. Nothing breaks.

Nothing is a 500, nothing hangs, and when all is over nothing is left open (`site` checks that).
"""

import json
import random
import socket
from collections import Counter

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast.router.api.http.openapi import description
from holdfast.router.config import LimitsConfig
from holdfast.router.wire.resume_codec import HOLD, RESUME
from tests.router.api.http.served import served

LIMITS = LimitsConfig(max_message_bytes=2**20)
HELLO = [{"role": "user", "content": "hello"}]
FINE = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/conversations": {"items": HELLO, "metadata": {"a": "b"}},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
NAMES = {
    path: sorted(description()["components"]["schemas"][schema]["properties"])
    for path, schema in (
        (path, methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2])
        for path, methods in description()["paths"].items()
        if path in FINE
    )
}
INNER = ["role", "content", "type", "text", "function", "name", "parameters", "arguments", "tool_calls", "schema", "id"]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["user", "assistant", "text", "function", "auto", "required", "none", "json_schema", "\x00", "\ud800"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(INNER), st.text(max_size=4)), inner)
    ),
    max_leaves=8,
)
HEADERS = st.dictionaries(
    st.sampled_from(["x-request-id", "x-tenant", "content-type", "authorization", HOLD, RESUME]),
    st.one_of(st.integers(0, 40).map(str), st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)),
    max_size=2,
)


@st.composite
def requests(draw) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body that was good before some of its fields were drawn anew, and headers."""
    path = draw(st.sampled_from(sorted(FINE)))
    changes = draw(st.dictionaries(st.sampled_from(NAMES[path]), VALUES, max_size=3))
    body = json.dumps({**FINE[path], **changes}).encode()
    if draw(st.integers(0, 9)) == 0:
        body = body[: draw(st.integers(0, len(body)))] + draw(st.binary(max_size=9))
    return path, body, draw(HEADERS)


def fuzz(num_requests: int) -> Counter[int]:
    seen: Counter[int] = Counter()
    with served(limits=LIMITS, stores=True) as router, httpx2.Client(verify=False, timeout=20) as client:

        @given(requests())
        @settings(
            max_examples=num_requests,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def answered(request):
            path, body, headers = request
            answer = client.post(f"http://{router.address}{path}", content=body, headers={**JSON, **headers})
            seen[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 415, 504), (path, body, headers, answer.text)
            if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
                assert "fault of Holdfast's" not in answer.text, (path, body, headers, answer.text)

        answered()
    return seen


JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
WHOLE = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
ABUSES = [
    b"",
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS greeting
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 300_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % number for number in range(5000)) + b"\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nx : y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
    HEAD + b"content-length: -5\r\n\r\n{}",
    HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
    HEAD + b"content-length: 500\r\n\r\n{}",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}xx\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"content-type: multipart/form-data\r\ncontent-length: 2\r\n\r\n{}",
    HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY),
    HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}",
    WHOLE * 20,
    WHOLE + b"junk" * 10 + WHOLE,
    WHOLE[:-10],
    WHOLE.replace(b"}", b', "stream": true}', 1) * 3,
    b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 30,
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET //%00%ff/../v1/models?%s HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\x00" * 5000,
]


def abused(address: str, sent: bytes, *, half_close: bool) -> bytes:
    """What a server says to some bytes. Whoever sends them waits for so long as the server talks, and no longer."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        answer = b""
        try:
            link.sendall(sent)
            if half_close:
                link.shutdown(socket.SHUT_WR)
            link.settimeout(0.05)
            while data := link.recv(2**16):
                answer += data
        except OSError:  # it was cut off, or there is no more to come
            pass
        return answer


def abuse(num_connections: int) -> None:
    draw = random.Random(5)
    with served(limits=LIMITS) as router:
        for number in range(num_connections):
            sent = ABUSES[number] if number < len(ABUSES) else mangled(draw, draw.choice(ABUSES))
            answer = abused(router.address, sent, half_close=number % 2 == 0)
            assert b"HTTP/1.1 500" not in answer, (sent[:300], answer)
        with httpx2.Client(verify=False) as client:
            assert client.get(f"http://{router.address}/health").status_code == 200
            assert (
                client.post(f"http://{router.address}/v1/chat/completions", content=BODY, headers=JSON).status_code
                == 200
            )


def mangled(draw: random.Random, sent: bytes) -> bytes:
    if not sent:
        return draw.randbytes(50)
    at, size = draw.randrange(len(sent)), draw.randrange(20)
    return sent[:at] + draw.randbytes(draw.randrange(4)) + sent[at + size :]


def test_bodies_beside_their_schemas_break_nothing():
    seen = fuzz(60)
    assert seen[200] > 5
    assert seen[400] > 10


def test_bytes_that_are_hardly_http_break_nothing():
    abuse(len(ABUSES) + 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_requests_break_nothing():
    fuzz(9_000)
    abuse(1_000)
