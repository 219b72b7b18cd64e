"""One request, struck by one fault at one token after the other, and its client must not be able to tell."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.cluster.client.async_client import AsyncClient
from tests.chaos.faults import Fault
from tests.chaos.forked import Forked, ForkedCluster
from tests.chaos.kinds import Answer, Kind, ask
from tests.chaos.tally import Row, Tally

LIMIT_S = 150

MAX_TRIES = 10
"""A signal may come after the end of a stream, which proves nothing: then it is asked for again, and struck sooner."""


@dataclass(frozen=True)
class Sweep:
    """One request, struck by one fault at one token after the other."""

    cluster: ForkedCluster
    client: AsyncClient
    kind: Kind
    fault: Fault
    right: Answer
    right_s: float
    """How long that took."""
    row: Row

    async def run(self, every: int) -> None:
        """Strikes when 1, 1 + `every`, ... tokens have come, up to the last but one."""
        for num_tokens in range(1, self.right.num_tokens, every):
            for num_tries in range(MAX_TRIES):
                if await self.strike(num_tokens, 0.8**num_tries):
                    break
            else:
                raise AssertionError(f"no signal hit the open stream after token {num_tokens}")

    async def strike(self, num_tokens: int, haste: float) -> bool:
        """Asks once, and strikes when that many tokens have come. Whether the request was open then.

        `haste` below 1 strikes that much sooner: the answer before was over when the blow came.
        """
        wanted = haste * num_tokens
        await self.cluster.until_up()
        before = await self.cluster.num_computed()
        reached = asyncio.Event()

        def look(answer: Answer) -> None:
            if answer.num_tokens >= wanted:
                reached.set()

        asking = asyncio.create_task(ask(self.client, self.kind, look))
        if self.kind.is_whole:  # nobody sees its tokens: they come at a steady pace
            await asyncio.sleep(self.right_s * wanted / self.right.num_tokens)
        else:
            await reached.wait()
        victim = await self.victim(asking.done)
        if victim is None or asking.done():
            await asking
            return False
        struck_s = time.monotonic()
        await self.fault.strike(victim)
        answer = await asking
        if self.was_missed(answer, struck_s):
            victim.send(signal.SIGKILL)  # a process that nothing asks any more does not end of what it lacks
            await self.fault.mend(self.cluster, victim)
            return False
        self.row.num_faults += 1
        self.row.pauses_s += [pause_s for pause_s in [answer.longest_pause_after(struck_s)] if pause_s is not None]
        self.row.judge(answer, self.right)
        self.row.num_recomputed += await self.num_recomputed(before, victim, int(wanted))
        if answer.num_attempts == 0:  # nobody knows whether the victim had a part in it
            victim.send(signal.SIGKILL)
        await self.fault.mend(self.cluster, victim)
        return True

    def was_missed(self, answer: Answer, struck_s: float) -> bool:
        """Whether it was told, or the replica had computed all of it, before the fault."""
        if self.fault.choose is ForkedCluster.serving_replica and answer.num_attempts == 1:
            return True
        return not self.kind.is_whole and answer.longest_pause_after(struck_s) is None

    async def victim(self, is_over: Callable[[], bool]) -> Forked | None:
        """Steps of a beam search are over before a load is told that has them: any replica may have the next one."""
        if self.kind.params.beam_width is not None and self.fault.choose is ForkedCluster.serving_replica:
            return random.choice(list(self.cluster.replicas.values()))
        return await self.fault.choose(self.cluster, is_over)

    async def num_recomputed(self, before: dict[str, int], victim: Forked, num_tokens: int) -> int:
        """What the others have computed beyond the tokens that were still to come, where that is known."""
        if self.kind.is_whole:
            return 0
        after = await self.cluster.num_computed()
        survivors = before.keys() & after.keys() - {victim.id}
        num_computed = sum(after[name] - before[name] for name in survivors)
        return max(0, num_computed - (self.right.num_tokens - num_tokens))


async def sweep(cluster: ForkedCluster, kind: Kind, fault: Fault, tally: Tally, every: int) -> None:
    async with asyncio.timeout(LIMIT_S), AsyncClient(cluster.addresses) as client:
        began_s = time.monotonic()
        right = await ask(client, kind)
        right_s = time.monotonic() - began_s
        assert right.is_whole
        row = tally.row(f"{fault.name}, {kind.name}")
        await Sweep(cluster, client, kind, fault, right, right_s, row).run(every)
    assert row.is_clean, row.differences
