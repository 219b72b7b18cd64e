"""Programs that a test on an event loop starts: run to their end, or while the test goes on.

They are started by `subprocess`, which forks without the handlers of `fork`. A loop's own `create_subprocess_exec` may
not be used: uvloop forks with them, and gRPC's crash the child when other threads are in gRPC.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

TIMEOUT_S = 150


async def outcome(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What the program printed, and its exit code. It is ended when the test is."""
    async with started(*words, cwd=cwd) as program:
        output, errors = await asyncio.to_thread(program.communicate, timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(words, program.returncode, output, errors)


async def printed_by(*words: str | Path) -> str:
    """The output of a program that must succeed."""
    ended = await outcome(*words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@asynccontextmanager
async def started(*words: str | Path, cwd: Path | None = None) -> AsyncIterator["subprocess.Popen[str]"]:
    """A program beside the test, with pipes; the end of the block is its end.

    Bytes that are not UTF-8 (openssl prints some) come as U+FFFD.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", cwd=cwd
    ) as program:
        try:
            yield program
        finally:
            program.kill()
