"""Changes of models by a router: what settings they are made with, what cancels them, and which logs are read."""

import asyncio
import json
import threading

import pytest

from holdfast.cluster.commands.models import given_settings
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.layers import Setting
from holdfast.cluster.serve import cluster_control, serving
from holdfast.cluster.serve.cluster_control import ServeControl
from holdfast.router.cluster_control import AddModel, ModelChanged, Progress
from holdfast.worker.errors import ConfigurationError, ReplicaError

OWN = HoldfastConfig.model_validate(
    {"cluster": {"namespace": "own", "host": "10.0.0.1", "drain_timeout_s": 7}, "limits": {"max_queued": 3}}
)


async def made(control: ServeControl, settings) -> list[Progress | ModelChanged]:
    return [event async for event in control.change(AddModel(settings=settings))]


def test_a_model_is_added_with_what_is_given_and_the_clusters_own_settings(monkeypatch, tmp_path):
    added: list[HoldfastConfig] = []

    def add_model(config, report) -> int:
        added.append(config)
        report("starting", 1, 1)
        return 2

    monkeypatch.setattr(serving, "add_model", add_model)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    given = {"model.model": "demo", "model.chat_template": str(template), "cluster.replicas": 2, "cluster.models": ()}
    loaded = load_config({path: Setting(value, "flag") for path, value in given.items()}, environ={})
    events = asyncio.run(made(ServeControl(OWN), json.loads(given_settings(loaded, ("model", "cluster")))))
    assert events[-1] == ModelChanged(model="demo", num_replicas=2)
    assert Progress("starting", 1, 1) in events
    (config,) = added
    assert (config.model.chat_template, config.cluster.replicas) == ("{{ messages }}", 2)
    assert (config.cluster.namespace, config.cluster.host, config.limits.max_queued) == ("own", "10.0.0.1", 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model": {"chat_template": "/etc/passwd"}}, "must be a template's text"),
        ({"model": {"modle": "x"}}, "unknown setting model.modle"),
        ({"cluster": {"replicas": 0}}, "cluster.replicas = 0"),
    ],
)
def test_settings_that_a_router_must_not_take_are_refused(settings, expected):
    with pytest.raises(ConfigurationError, match=expected):
        asyncio.run(made(ServeControl(OWN), settings))


def test_one_change_at_a_time_and_a_closed_one_is_interrupted(monkeypatch):
    began, interrupted, may_go_on = threading.Event(), threading.Event(), threading.Event()

    def add_model(config, report) -> int:
        began.set()
        try:
            may_go_on.wait(60)
            report("starting", 0, 1)
        except BaseException:
            interrupted.set()
            raise
        return 1

    monkeypatch.setattr(serving, "add_model", add_model)

    async def run() -> None:
        control = ServeControl(OWN)
        first = control.change(AddModel(settings={}))
        await anext(first)
        with pytest.raises(ReplicaError, match="changing a model already"):
            await made(control, {})
        assert await asyncio.to_thread(began.wait, 60)
        await first.aclose()
        may_go_on.set()
        assert await asyncio.to_thread(interrupted.wait, 60)

    asyncio.run(run())


def test_logs_are_those_of_the_cluster_alone(monkeypatch, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, (namespace, line) in enumerate((("own", "mine"), ("other", "not mine")), start=11):
        actor = f":actor_name:ServeReplica:{namespace}:Router\n"
        (logs / f"worker-aa-01000000-{number}.err").write_text(f"{actor}2026-01-01 10:00:00,000 WARNING {line}\n")
    (logs / "worker-cc-01000000-13.out").write_text(":actor_name:RankActor\na rank\n")
    monkeypatch.setattr(cluster_control, "session_folder", lambda: tmp_path)

    async def read(config: HoldfastConfig, process: str = "") -> list[tuple[str, str]]:
        lines = ServeControl(config).read_logs(process, 10, follows=False)
        return [(one.process, one.text) async for batch in lines for one in batch]

    own = [("router 11", "2026-01-01 10:00:00,000 WARNING mine")]
    assert asyncio.run(read(OWN)) == [("rank 13", "a rank"), *own]
    shared = OWN.model_copy(update={"cluster": OWN.cluster.model_copy(update={"address": "auto"})})
    assert asyncio.run(read(shared)) == own
    with pytest.raises(ConfigurationError, match="router 11"):
        asyncio.run(read(shared, "router 12"))
