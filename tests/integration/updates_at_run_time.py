"""Streams that run while their model is updated, and what must hold of each: one version, from beginning to end."""

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import version_of
from holdfast.worker.sampling_params import SamplingParams
from tests.integration import models_at_run_time as run_time

NUM_AT_ONCE = 6
PROMPTS = ("The capital of France is", "Monday, Tuesday,", "Three plus four is")


@dataclass
class Stream:
    prompt: str
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    is_guaranteed: bool = True
    error: HoldfastError | None = None

    @property
    def version(self) -> str:
        (version,) = self.versions
        return version


def wish(number: int) -> Stream:
    """Greedy and sampled, a few dozen different ones, so that each can be computed once."""
    params = SamplingParams(
        temperature=0.9 if number % 2 else 0.0, seed=number % 4, max_tokens=120 + 20 * (number % 3), ignore_eos=True
    )
    return Stream(PROMPTS[number % len(PROMPTS)], params)


async def _read(client: AsyncClient, model: str, stream: Stream) -> Stream:
    try:
        async for chunk in client.stream(stream.prompt, stream.params, model=model):
            assert chunk.first_token_index == len(stream.token_ids)
            stream.token_ids += chunk.token_ids
            stream.versions.add(version_of(chunk.system_fingerprint))
            stream.is_guaranteed &= not chunk.replayed_without_guarantee
    except HoldfastError as error:
        stream.error = error
    return stream


async def _traffic(routers: Sequence[str], model: str, is_over: asyncio.Event, first: int) -> list[Stream]:
    streams, number = [], first
    async with AsyncClient(list(routers)) as client:
        while not is_over.is_set():
            streams.append(await _read(client, model, wish(number)))
            number += NUM_AT_ONCE
    return streams


async def traffic_during(routers: Sequence[str], model: str, *command: str):
    """What `holdfast models` said, and every stream that was open before, during or after it."""
    return await traffic_while(routers, model, lambda: run_time.models(*command))


async def traffic_while(routers: Sequence[str], model: str, act: "Callable[[], subprocess.CompletedProcess[str]]"):
    """What `act`, on a thread, gives, and every stream that was open before, during or after it."""
    is_over = asyncio.Event()
    running = [asyncio.create_task(_traffic(routers, model, is_over, first)) for first in range(NUM_AT_ONCE)]
    await asyncio.sleep(2.0)  # every worker has a stream open by then, on the old version
    said = await asyncio.to_thread(act)
    await asyncio.sleep(1.0)
    is_over.set()
    return said, [stream for streams in await asyncio.gather(*running) for stream in streams]


def answer(router: str, model: str) -> str:
    return asyncio.run(run_time.answer_of(router, model, run_time.SHORT))
