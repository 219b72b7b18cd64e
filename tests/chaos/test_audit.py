"""An audit from outside finds nothing while replicas are killed under it."""

import asyncio
import signal
from pathlib import Path

import pytest

from holdfast.cluster.verify.audit import Audit
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.subject import Sizes, Subject
from holdfast.cluster.verify.transport import Budget, Transport
from tests import loops
from tests.chaos.forked import ForkedCluster, forked_cluster

LIMIT_S = 150
CHECKS = ("purity", "stop", "streams", "during")
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


async def audited(cluster: ForkedCluster, **settings: object) -> Audit:
    router = f"http://{cluster.routers[0].http_address}"
    transport = Transport(router, "", Budget(rate=1e5))
    sizes = Sizes(num_prompts=2, num_tokens=12, company=4, pause_s=0.0)
    audit = Audit(subject=Subject(model="", nonce="chaos", sizes=sizes), **settings)
    await audit.run(transport)
    await transport.close()
    return audit


async def kill_serving(cluster: ForkedCluster, auditing: "asyncio.Task[Audit]", most: int) -> int:
    """Kills the replica that serves, and replaces it, `most` times over the audit."""
    num_kills = 0
    while num_kills < most and (victim := await cluster.serving_replica(auditing.done)) is not None:
        victim.send(signal.SIGKILL)
        num_kills += 1
        cluster.forget(victim)
        await cluster.add_replica()
        await cluster.until_up()
    return num_kills


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_that_are_killed_under_an_audit_are_not_seen(tmp_path: Path, kills: int):
    async def run() -> None:
        async with forked_cluster(tmp_path) as cluster:
            killing: list[asyncio.Task[int]] = []

            def command() -> bool:
                """Kills during open streams, in place of a shell's command."""
                if not killing:
                    killing.append(asyncio.create_task(kill_serving(cluster, auditing, kills)))
                return not killing[0].done()

            auditing = asyncio.create_task(audited(cluster, checks=CHECKS, command=command))
            before = await kill_serving(cluster, auditing, kills)
            audit = await auditing
            assert (before, await killing[0]) == (kills, kills)
            assert [one for one in audit.subject.findings if one.kind is not Kind.NOTE] == []
            assert [result.name for result in audit.results if not result.num_compared] == ["reach"]

    loops.run(run(), timeout_s=LIMIT_S)
