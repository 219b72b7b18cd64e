"""A connection that sends some bytes to a port of a router and reads what comes back."""

import asyncio
import socket
import struct
from typing import Final

NO_LINGER: Final = struct.pack("ii", 1, 0)
"""Closing resets the connection: its port is free again at once."""
TURNS: Final = 60
"""Of the loop, that a server has to answer in before the client goes."""
MAX_READ: Final = 2**18


async def said_to(address: str, sent: bytes) -> bytes:
    """What a server says to some bytes within a few turns of the loop."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    link = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    answer = b""
    try:
        writer.write(sent)
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if reader.at_eof():
                break
        async with asyncio.timeout(0.002):
            while (data := await reader.read(2**16)) and len(answer) < MAX_READ:
                answer += data
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return answer
