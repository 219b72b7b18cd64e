"""How often the processes of an idle cluster wake for something of Holdfast's, in virtual time: a bound for each of
them.

Wake-ups are most of what an idle cluster takes. `python -m benchmarks.idle_cluster` measures them with all of Ray's.
"""

import asyncio
import select
from types import SimpleNamespace

import pytest

from holdfast.cluster.serve import directory as directory_module
from holdfast.cluster.serve.directory import DirectoryDeployment, Member, Role
from holdfast.cluster.serve.membership import Lease
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.api.http.server import _Embedded
from holdfast.router.api.overload_probe import OverloadProbe
from holdfast.router.config import OverloadConfig
from holdfast.router.links.replica_link import LinkWatch
from holdfast.router.overload.byte_ledger import ByteLedger
from holdfast.router.overload.overload import Overload
from holdfast.v1 import engine_pb2
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.replica import hang_supervisor, link_server
from holdfast.worker.replica.heartbeat_pipe import HeartbeatPipe
from holdfast.worker.replica.link_server import RouterLink
from tests.virtual_loop import VirtualLoop, run, wakeups_in

SECONDS = 60
MEMBERS = [Member(member_id=f"m{number}", role=Role.REPLICA) for number in range(3)]


class FakeHandle:
    """A Serve handle that answers at once."""

    class Renew:
        @staticmethod
        async def remote(member: Member) -> None:
            pass

    renew = Renew


class Pipe(HeartbeatPipe):
    """A pipe whose other end is nobody."""

    def __init__(self) -> None:
        self._is_cut, self._beat_every_s = False, 0.5

    def _write(self, what: bytes) -> None:
        pass


def idle_engine() -> SimpleNamespace:
    return SimpleNamespace(has_work=False, progress=ProgressCounter())


def beating(engine: SimpleNamespace) -> RouterLink:
    return RouterLink(engine, "link-1", vocab_size=10)


async def count(*parts: object) -> float:
    """Wake-ups a second of what runs side by side."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    await asyncio.sleep(1.0)  # what begins may have much to do
    found = await wakeups_in(SECONDS)
    for task in tasks:
        task.cancel()
    return found / SECONDS


def test_an_idle_router_wakes_four_times_a_second():
    async def router() -> float:
        Lease(FakeHandle, MEMBERS[0])
        watches = [LinkWatch(lambda: False, 1.0, 0.2, asyncio.get_running_loop().time) for _ in range(4)]
        http = _Embedded(
            SimpleNamespace(
                date_header=False,
                encoded_headers=[],
                callback_notify=None,
                limit_max_requests=None,
                limit_max_requests_jitter=0,
            )
        )
        probe = OverloadProbe(Overload(OverloadConfig(), ByteLedger(OverloadConfig()), 2**40), lambda: 0)
        return await count(
            Pipe().keep_beating(), http.main_loop(), probe.run(), *(watch.until_frozen() for watch in watches)
        )

    assert run(router()) <= 4


def test_an_idle_replica_wakes_three_times_a_second():
    async def replica() -> float:
        Lease(FakeHandle, MEMBERS[0])
        return await count(Pipe().keep_beating(), *(beating(idle_engine()).beat(0.2) for _ in range(4)))

    assert run(replica()) <= 3


def test_an_idle_directory_wakes_twice_in_five_seconds_for_each_watcher(monkeypatch):
    """And once for each member that renews its lease, which wakes no watcher."""

    async def members(hosted: DirectoryDeployment) -> None:
        while True:
            for member in MEMBERS:
                await hosted.renew(member)
            await asyncio.sleep(directory_module.RENEW_S)

    async def watcher(hosted: DirectoryDeployment) -> None:
        version = 0
        while True:
            version = (await hosted.watch(version)).version

    async def whole() -> float:
        monkeypatch.setattr(directory_module.time, "monotonic", asyncio.get_running_loop().time)
        hosted = DirectoryDeployment(ClusterSecurity(token="t"))
        return await count(members(hosted), watcher(hosted), watcher(hosted))

    assert run(whole()) <= 2 * 0.4 + 1 / directory_module.RENEW_S + 0.1


def test_a_hang_supervisor_wakes_four_times_a_second_and_asks_for_no_debugger_while_beats_come(monkeypatch):
    wakeups, now, questions = [0], [0.0], []

    class Poll:
        """Beats come every half second; the leader ends after a minute."""

        def register(self, descriptor: int, events: int) -> None:
            pass

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            wakeups[0] += 1
            before, now[0] = now[0], min(now[0] + timeout_ms / 1000, (now[0] // 0.5 + 1) * 0.5)
            if now[0] >= SECONDS:
                return [(ENDING, select.POLLIN)]
            return [(BEATS, select.POLLIN)] if now[0] // 0.5 > before // 0.5 else []

    BEATS, ENDING = 3, 4
    monkeypatch.setattr(hang_supervisor.select, "poll", Poll)
    monkeypatch.setattr(hang_supervisor.os, "read", lambda descriptor, count: b".")
    monkeypatch.setattr(hang_supervisor.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hang_supervisor, "is_traced", lambda pid: bool(questions.append(now[0])))
    leader = SimpleNamespace(open=lambda: ENDING, pid=1)
    assert not hang_supervisor.hangs(leader, BEATS, 5.0)
    assert wakeups[0] <= 4 * SECONDS + 2
    assert len(questions) <= 2 * SECONDS + 2


@pytest.mark.parametrize("wait_s", [0.0, 0.13, 7.0])
def test_a_heart_beats_as_soon_as_there_is_work_and_until_it_is_done(wait_s, monkeypatch):
    monkeypatch.setattr(link_server, "engine_request", lambda *_: None)

    async def replica() -> list[float]:
        engine = idle_engine()
        link = beating(engine)
        loop = asyncio.get_running_loop()
        beats: list[float] = []
        link._outbox = SimpleNamespace(put_nowait=lambda beat: beats.append(loop.time()))
        task = asyncio.create_task(link.beat(0.2))
        for _ in range(2):
            await asyncio.sleep(wait_s)
            began_s = loop.time()
            engine.submit = lambda *_: setattr(engine, "has_work", True)
            link._submit(engine_pb2.Submit(attempt=1))
            await asyncio.sleep(1.01)
            engine.has_work = False
            found = [round(beat_s - began_s, 3) for beat_s in beats]
            await asyncio.sleep(0.5)
            assert len(beats) == len(found), "it goes on beating"
            beats.clear()
        task.cancel()
        return found

    assert run(replica()) == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_replica_that_freezes_at_its_first_request_is_found_a_second_later():
    """However long it has been idle: the time before does not count."""

    async def router() -> float:
        loop = asyncio.get_running_loop()
        busy = [False]
        watch = LinkWatch(lambda: busy[0], 1.0, 0.2, loop.time)
        verdict = asyncio.create_task(watch.until_frozen())
        await asyncio.sleep(100.03)
        busy[0] = True
        watch.note_work()
        await verdict
        return loop.time() - 100.03

    assert 1.0 <= run(router()) <= 1.2 + 1e-6


def test_the_virtual_loop_counts():
    async def thrice() -> int:
        asyncio.get_running_loop().call_later(1.0, lambda: None)
        asyncio.get_running_loop().call_later(2.0, lambda: None)
        return await wakeups_in(3.0)

    assert run(thrice()) == 2
    assert VirtualLoop().time() == 0.0
