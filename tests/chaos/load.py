"""Clients that never stop asking, and what each of their answers came to."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.cluster.client.async_client import AsyncClient
from tests.chaos.kinds import Answer, Kind, ask
from tests.chaos.tally import Row
from tests.under_way import were_under_way

POLL_S = 0.02
SETTLED_S = 180.0
"""Where the kernel ends all replicas, and a worker that starts in place of one, Ray waits 60 s before the next."""


class Load:
    """Made by `steady_load`. Every client goes through the kinds in turn, each from another one on."""

    def __init__(self, kinds: Sequence[Kind], right: Sequence[Answer]) -> None:
        self._kinds = kinds
        self.right = right
        """Answers without faults, by kind."""
        self._open: dict[int, Answer] = {}
        self._unjudged: list[tuple[Answer, Answer]] = []

    async def under_way(self, at_least: int) -> list[Answer]:
        """Returns those streams that have come to a token and have not ended, once there are so many."""
        async with asyncio.timeout(SETTLED_S):
            while len(found := [answer for answer in self._open.values() if answer.arrivals_s]) < at_least:
                await asyncio.sleep(POLL_S)
        return found

    async def settle(self, struck_s: float, struck: Sequence[Answer] = ()) -> list[float]:
        """Waits until every stream that is open now, and each of `struck`, has come to its end. The longest pause of
        each of them since. Where `struck` is given, one of those at least was under way then.
        """
        open_now = [answer for answer in self._open.values() if answer.arrivals_s]
        caught = list({id(answer): answer for answer in (*struck, *open_now)}.values())
        async with asyncio.timeout(SETTLED_S):
            while any(not answer.is_over for answer in caught):
                await asyncio.sleep(POLL_S)
        if struck:
            were_under_way([answer.arrivals_s for answer in struck], struck_s)
        pauses_s = [answer.longest_pause_after(struck_s) for answer in caught]
        return [pause_s for pause_s in pauses_s if pause_s is not None]

    async def judge_all(self, row: Row) -> None:
        """Every answer that has come to its end, and those that are open now once they have."""
        caught = list(self._open.values())
        async with asyncio.timeout(SETTLED_S):
            while any(not answer.is_over for answer in caught):
                await asyncio.sleep(POLL_S)
        for answer, right in self._unjudged:
            row.judge(answer, right)
        self._unjudged.clear()

    async def run(self, number: int, first: int, addresses: Sequence[str], connect_s: float) -> None:
        """One client, for ever. `first`: the kind that it begins with."""
        async with AsyncClient(addresses, draw=lambda: (number % 2) / 2, connect_s=connect_s) as client:
            for turn in itertools.count(first):
                index = turn % len(self._kinds)
                answer = await ask(client, self._kinds[index], lambda answer: self._open.update({number: answer}))
                self._open.pop(number, None)
                self._unjudged.append((answer, self.right[index]))


@asynccontextmanager
async def steady_load(
    addresses: Sequence[str], kinds: Sequence[Kind], num_clients: int, connect_s: float = 5.0
) -> AsyncIterator[Load]:
    """Asks for each kind once, while nothing goes wrong; then goes on until the block ends. `connect_s` as clients'."""
    async with AsyncClient(addresses) as client:
        right = [await ask(client, kind) for kind in kinds]
    assert all(answer.is_whole for answer in right)
    load = Load(kinds, right)
    apart = max(1, len(kinds) // num_clients)
    runs = [load.run(number, number * apart, addresses, connect_s) for number in range(num_clients)]
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        yield load
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
