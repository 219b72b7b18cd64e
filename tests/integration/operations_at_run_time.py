"""What operators do to a running cluster by the command line: pause, drain, dump, apply."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.sampling_params import SamplingParams
from tests.integration.models_at_run_time import LIMIT_S, PROMPT

SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def holdfast(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "holdfast.cluster.commands.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def apply(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """To the cluster that this process runs."""
    return holdfast("apply", *arguments, "--pid", str(os.getpid()))


def dumped(router: str) -> dict:
    return json.loads(holdfast("dump", "--server", router).stdout)[router]


async def until_all(routers: Sequence[str], condition) -> None:
    """Until every router's dump says so."""
    async with asyncio.timeout(LIMIT_S):
        for router in routers:
            while not condition(await asyncio.to_thread(dumped, router)):
                pass


async def asked_while_paused(routers: Sequence[str], model: str) -> tuple[bool, str]:
    """Whether a request to the other router waits while one was told to pause, and what it gets when that is over."""
    said = await asyncio.to_thread(holdfast, "pause", model, "--server", routers[0])
    assert said.returncode == 0, said.stderr
    await until_all(routers, lambda state: len(state["orders"]["pauses"]) == 1)
    async with AsyncClient(routers[1]) as client:
        asking = asyncio.create_task(client.generate(PROMPT, SHORT, model=model))
        await until_all(routers[1:], lambda state: state["requests"]["paused"] == 1)
        waits = not asking.done()
        said = await asyncio.to_thread(holdfast, "resume", model, "--server", routers[1])
        assert said.returncode == 0, said.stderr
        return waits, (await asking).completions[0].text
