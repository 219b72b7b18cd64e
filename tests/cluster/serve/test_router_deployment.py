"""What a router is started with, and one that starts while others serve."""

import asyncio
from types import SimpleNamespace

import pytest

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import router_deployment
from holdfast.cluster.serve.directory import Member, Role
from holdfast.cluster.serve.router_deployment import RouterDeployment
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.server.router import Router
from holdfast.worker.config import SchedulerConfig
from tests import virtual_loop
from tests.cluster.serve.test_membership import FakeHandle, replica


def test_a_router_serves_in_the_order_of_its_replicas(monkeypatch):
    started = {}

    async def start(*arguments: object, **options: object) -> None:
        started.update(options)

    monkeypatch.setattr(Router, "start", start)
    config = HoldfastConfig(scheduler=SchedulerConfig(aging_s=7.0, tenant_shares={"gold": 4.0}))
    asyncio.run(router_deployment._start(config, "127.0.0.1", None, ClusterSecurity(token="t")))
    assert (started["order"].aging_s, started["order"].tenant_shares) == (7.0, {"gold": 4.0})


class FakeRouter:
    """Serves at its port and reaches no replica."""

    address, http_address = "127.0.0.1:1", "127.0.0.1:2"

    def __init__(self) -> None:
        self.overload = SimpleNamespace(ledger=SimpleNamespace(on_input=None))
        self.stops: list[bool] = []
        """Of each call to `stop`, whether it hands over."""

    async def stop(self, grace_s: float, *, hands_over: bool) -> None:
        self.stops.append(hands_over)

    def demands(self) -> tuple[()]:
        return ()


class Replacing(RouterDeployment):
    """Replaces routers, and waits for replicas before it says that it serves."""

    def __init__(self) -> None:
        self.is_made = asyncio.Event()

    async def make(self, directory: FakeHandle) -> None:
        await RouterDeployment.__init__(self, HoldfastConfig(), "127.0.0.1", directory, replaces=True)
        self.is_made.set()

    async def end(self) -> None:
        await RouterDeployment.__del__(self)

    def __del__(self) -> None:
        """Only Serve awaits the coroutine."""


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    """What the deployment starts, in this process, whose signals and logs it leaves alone."""
    router = FakeRouter()

    async def start(*arguments: object, **options: object) -> FakeRouter:
        return router

    for name in ("date_log_lines", "end_when_out_of_memory", "end_on_sigterm", "set_aside"):
        monkeypatch.setattr(router_deployment, name, lambda *arguments, **options: None)
    monkeypatch.setattr(router_deployment.serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="new"))
    monkeypatch.setattr(router_deployment, "_start", start)
    monkeypatch.setattr(RouterDeployment, "_begin_journal", lambda self, router, namespace: None)
    monkeypatch.setattr(RouterDeployment, "_keep_telling", lambda self, router: asyncio.Event().wait())
    return router


async def _directory(*members: Member) -> FakeHandle:
    async def security() -> ClusterSecurity:
        return ClusterSecurity(token="t")

    directory = FakeHandle()
    directory.security = SimpleNamespace(remote=security)
    for member in members:
        await directory._renew(member)
    return directory


SERVING_REPLICA = replica(1)
OTHER_ROUTER = Member(member_id="other", role=Role.ROUTER, address="127.0.0.1:3", phase="serving")


def test_a_router_that_ends_before_it_has_reached_its_replicas_hands_its_streams_over(router: FakeRouter):
    """Its port is open by then, so clients may be there."""

    async def scenario() -> None:
        directory = await _directory(SERVING_REPLICA, OTHER_ROUTER)
        deployment = Replacing()
        making = asyncio.create_task(deployment.make(directory))
        await asyncio.sleep(1.0)
        assert not deployment.is_made.is_set()
        await deployment.end()
        assert router.stops == [True]
        await making
        assert deployment._telling == []
        assert "new" not in {member.member_id for member in directory.members}

    virtual_loop.run(scenario())


def test_a_router_that_replaces_others_does_not_wait_for_a_replica_that_is_gone(router: FakeRouter):
    async def scenario() -> None:
        directory = await _directory(SERVING_REPLICA, OTHER_ROUTER)
        deployment = Replacing()
        making = asyncio.create_task(deployment.make(directory))
        await asyncio.sleep(1.0)
        assert not deployment.is_made.is_set()
        await directory._remove(SERVING_REPLICA.member_id)
        await asyncio.sleep(2 * router_deployment.LINK_CHECK_S)
        assert deployment.is_made.is_set()
        await making
        await deployment.end()

    virtual_loop.run(scenario())


def test_a_router_waits_for_its_replicas_while_the_directory_does_not_answer(router: FakeRouter, caplog):
    """Until its limit; then it serves, and says so."""

    async def scenario() -> None:
        directory = await _directory(SERVING_REPLICA, OTHER_ROUTER)
        answers = directory.watch.remote

        async def lost(*_: object) -> None:
            raise ConnectionError("the directory is being replaced")

        deployment = Replacing()
        making = asyncio.create_task(deployment.make(directory))
        await asyncio.sleep(1.0)
        directory.watch.remote = lost
        await asyncio.sleep(1.0)
        assert not deployment.is_made.is_set()
        directory.watch.remote = answers
        await asyncio.sleep(router_deployment.LINK_S)
        assert deployment.is_made.is_set()
        assert "has not reached every replica" in caplog.text
        await making
        await deployment.end()

    virtual_loop.run(scenario())
