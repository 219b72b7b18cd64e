"""Routers get other settings: when that is over, and what is done where they do not come to serve."""

import pytest

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import models, router_update
from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.cluster.serve.router_deployment import PortTakenError, _once_there_is_a_port
from holdfast.cluster.serve.router_update import of_router, replace_routers
from holdfast.worker.errors import ConfigurationError, UpdateRolledBackError
from tests.loops import on_a_loop

OLD, NEW = (HoldfastConfig.model_validate({"limits": {"max_queued": number}}) for number in (1, 2))


class FakeDirectory:
    """Says one list of routers after the other, and the last of them for ever."""

    def __init__(self, *views: list[Member]) -> None:
        self.views = list(views)

    @property
    def watch(self) -> "FakeDirectory":
        return self

    def remote(self, version: int) -> "FakeDirectory":
        return self

    def result(self, timeout_s: float) -> Snapshot:
        members = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        return Snapshot(version=1, members=tuple(members), is_settled=True)


def router(name: str, config: HoldfastConfig, *, is_up: bool = True, error: str | None = None) -> Member:
    return Member(
        member_id=name, role=Role.ROUTER, address="h:1" if is_up else None, settings=of_router(config), error=error
    )


@pytest.fixture
def deployed(monkeypatch) -> list[HoldfastConfig]:
    found: list[HoldfastConfig] = []
    monkeypatch.setattr(router_update, "_deploy", found.append)
    monkeypatch.setattr(router_update, "_check_its_own", lambda namespace: None)
    monkeypatch.setattr(router_update, "_LOOK_EVERY_S", 0.0)
    return found


def replace(monkeypatch, *views: list[Member]) -> list[tuple[int, int]]:
    reported: list[tuple[int, int]] = []
    monkeypatch.setattr(models, "directory_of", lambda namespace: FakeDirectory(*views))
    replace_routers(OLD, NEW, lambda phase, done, total: reported.append((done, total)))
    return reported


def test_it_is_over_when_all_have_the_new_settings_and_the_old_ones_are_gone(deployed, monkeypatch):
    views = (
        [router("a", OLD), router("b", OLD)],
        [router("b", OLD), router("c", NEW, is_up=False)],
        [router("b", OLD), router("c", NEW)],
        [router("b", OLD), router("c", NEW), router("d", NEW)],
        [router("c", NEW), router("d", NEW)],
    )
    assert replace(monkeypatch, *views) == [(0, 2), (0, 2), (1, 2), (2, 2), (2, 2)]
    assert deployed == [NEW]


def test_a_router_that_cannot_start_brings_the_old_settings_back(deployed, monkeypatch):
    broken = router("c", NEW, is_up=False, error="limits.max_queued = 2: not today")
    with pytest.raises(UpdateRolledBackError, match=r"the routers keep their settings: .* not today$"):
        replace(monkeypatch, [router("b", OLD), broken])
    assert deployed == [NEW, OLD]


def test_routers_that_never_come_bring_the_old_settings_back(deployed, monkeypatch):
    monkeypatch.setattr(router_update, "START_S", -30.0)
    with pytest.raises(UpdateRolledBackError, match="0 of 2 routers serve with the new settings after 0 s"):
        replace(monkeypatch, [router("b", OLD)])
    assert deployed == [NEW, OLD]


@on_a_loop
async def test_a_router_waits_for_the_port_of_the_one_that_goes_and_for_nothing_else():
    failures: list[ConfigurationError] = [PortTakenError("taken"), PortTakenError("taken")]

    async def start() -> str:
        if failures:
            raise failures.pop(0)
        return "router"

    assert await _once_there_is_a_port(start, 30.0) == "router"
    failures.append(PortTakenError("taken"))
    with pytest.raises(PortTakenError):
        await _once_there_is_a_port(start, -60.0)
    failures.append(ConfigurationError("exposed"))
    with pytest.raises(ConfigurationError, match="exposed"):
        await _once_there_is_a_port(start, 30.0)


def test_routers_of_a_rayservice_are_not_touched(monkeypatch):
    from ray import serve

    class Status:
        def __init__(self) -> None:
            self.applications = {"holdfast": self}
            self.deployments = {"Router": None, "Replica": None}

    monkeypatch.setattr(serve, "status", Status)
    with pytest.raises(ConfigurationError, match="part of the application 'holdfast'"):
        router_update._check_its_own("holdfast")
