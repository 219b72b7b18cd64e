"""Streams of a live cluster: requests of all kinds, what their clients were told, and what to wait for around them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams

NUM_STREAMS = 64

WORDS = ("The capital of France is", "Monday, Tuesday,", "Three plus four is", "What is the currency of Japan?")


@dataclass(frozen=True)
class Wish:
    """A request, and after how many tokens its client goes away (None: it stays)."""

    prompt: str
    params: SamplingParams
    leaves_after: int | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: HoldfastError | None = None
    last_s: float = 0.0
    longest_pause_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When each chunk came, by the monotonic clock."""


def wish(number: int) -> Wish:
    """Greedy and seeded, short and long; one in three leaves midway."""
    greedy = number % 2 == 0
    params = SamplingParams(
        temperature=0.0 if greedy else 0.8,
        top_k=0 if greedy else 20,
        seed=number,
        max_tokens=16 + number % 17,
        ignore_eos=True,
    )
    return Wish(f"{number}. {WORDS[number % len(WORDS)]}", params, leaves_after=4 if number % 3 == 0 else None)


LONG_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ,.]{150,400}"}, "ignore_eos": False},
    {"temperature": 0.9, "stop": ["zebra", "qu"], "min_tokens": 60, "logit_bias": {5: 1.0}, "bad_words": ["the"]},
)


def long_wish(number: int) -> Wish:
    """One of each kind of request: plain, penalized, structured, and with text that is held back."""
    kind = {"seed": number % len(WORDS), "max_tokens": 150, "ignore_eos": True} | LONG_KINDS[number % len(LONG_KINDS)]
    return Wish(WORDS[number % len(WORDS)], SamplingParams(**kind))


async def ask(client: AsyncClient, wish: Wish, on_first: Callable[[], None] = lambda: None, **options: Any) -> Answer:
    """Asks for a wish. `options`: of the call."""
    answer = Answer()
    try:
        async for chunk in client.stream(wish.prompt, wish.params, **options):
            assert chunk.first_token_index == len(answer.token_ids)
            answer.token_ids += chunk.token_ids
            answer.text += chunk.text
            answer.finish_reason = chunk.finish_reason
            now_s = time.monotonic()
            answer.longest_pause_s = max(answer.longest_pause_s, now_s - (answer.last_s or now_s))
            answer.last_s = now_s
            answer.arrivals_s.append(now_s)
            if len(answer.arrivals_s) == 1:
                on_first()
            if wish.leaves_after is not None and len(answer.token_ids) >= wish.leaves_after:
                break
    except HoldfastError as error:
        answer.error = error
    return answer


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def is_idle(client: AsyncClient) -> bool:
    """No request is open, nothing runs or waits, and every block is free."""
    load = await client.get_load()
    replicas_idle = [
        (replica.num_running, replica.num_waiting) == (0, 0) and replica.num_free_blocks == replica.num_total_blocks
        for replica in load.replicas
    ]
    return load.num_open == 0 and len(replicas_idle) == 2 and all(replicas_idle)


async def has_load(client: AsyncClient, num_open: int, num_replicas: int = 2) -> bool:
    """Whether the client's router has so many requests and replicas. False where there is no router."""
    try:
        load = await client.get_load()
    except ReplicaError:
        return False
    return (load.num_open, len(load.replicas)) == (num_open, num_replicas)


async def both_are_back(addresses: Sequence[str]) -> None:
    for address in addresses:
        async with AsyncClient(address) as client:
            await until(lambda client=client: has_load(client, num_open=0), 30.0)
