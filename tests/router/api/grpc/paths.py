"""Paths that are no text, and a request over raw HTTP/2 that has one."""

import asyncio

from tests.router.api.grpc.http2_attacker import ACK, END_HEADERS, HEADERS, PING, PREFACE, SETTINGS, frame

TIMEOUT_S = 60
PATHS = [b"/\xe2A/Generate", b"/holdfast.v1.Inference/\xff", b"\xc3", b"/holdfast.v1.Inference/\xed\xa0\x80"]


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that HPACK's table does not keep."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def send_path(address: str, path: bytes) -> None:
    """Sends a request with this path, and waits until the server has read it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    block = b"".join(literal(name, value) for name, value in fields.items())
    pinged = frame(PING, 0, 0, b"over you")
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block) + pinged)
    await asyncio.wait_for(reader.readuntil(frame(PING, ACK, 0, b"over you")), TIMEOUT_S)
    writer.close()
