"""What is changed at run time: models, replicas, weights, orders of operators, settings. It ends no stream."""

import asyncio
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.bundled_model import bundled_model
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.serve import models
from holdfast.cluster.serve.serving import add_model
from holdfast.cluster.serve.start_up import Serving
from holdfast.worker.sampling_params import SamplingParams
from tests.integration import elastic
from tests.integration import models_at_run_time as run_time
from tests.integration import operations_at_run_time as operations
from tests.integration import updates_at_run_time as updates

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.mark.slow
def test_a_model_comes_and_goes_while_the_others_serve(cluster: Serving, alone: Callable[[SamplingParams], str]):
    """Added through a router, removed on its machine, on a Ray without a CPU for it. Its last stream ends normally;
    later requests are refused by name.
    """
    listed = run_time.models("list").stdout
    assert "demo  running  replicas=2" in listed
    assert run_time.models_at(cluster.routers[1], "list").stdout == listed
    refused = run_time.models_at(cluster.routers[0], "add", "demo")
    assert (refused.returncode, "has a model of this name already" in refused.stderr) == (2, True)
    template = "{% for m in messages %}The capital of {{ m.content }} is{% endfor %}"  # as PROMPT asks
    named = ("--served-model-name", "other", "--chat-template", template)
    added = run_time.models_at(cluster.routers[0], "add", "demo", *named)
    assert added.returncode == 0, added.stderr
    assert "other is served by 1 replica" in added.stdout
    both = {"demo": 2, "other": 1}
    assert asyncio.run(run_time.served_models(cluster.routers)) == [both, both]
    for router in cluster.routers:
        assert asyncio.run(run_time.answer_of(router, "other", run_time.SHORT)) == alone(run_time.SHORT)
        assert asyncio.run(run_time.chat_answer_of(router, "other", "France", run_time.SHORT)) == alone(run_time.SHORT)
    text, said, unknown = asyncio.run(run_time.streams_through_a_removal(cluster.routers[0], "other"))
    assert said.returncode == 0, said.stderr
    assert text == alone(run_time.LONG)
    assert unknown == "model 'other' is not served here; served: demo"
    assert asyncio.run(run_time.served_models(cluster.routers)) == [{"demo": 2}, {"demo": 2}]
    again = run_time.models("remove", "other")
    assert (again.returncode, "'other' is not served here; served: demo" in again.stderr) == (2, True)


@pytest.mark.slow
def test_replicas_follow_the_load_and_no_stream_notices(cluster: Serving, alone: Callable[[SamplingParams], str]):
    """1 to 3 to 1 to 0 to 1 under traffic: every stream is whole, and as one process answers."""
    right = functools.cache(alone)
    right(elastic.GREEDY), right(elastic.DRAWN)
    assert add_model(elastic.config(), lambda phase, done, total: None) == 1
    try:
        traffic, times = asyncio.run(elastic.grows_and_shrinks(cluster.routers, right))
    finally:
        models.remove("holdfast", elastic.NAME, 60.0)
    print("seconds:", {name: round(value, 1) for name, value in times.items()}, traffic.num_whole, "streams")
    assert traffic.wrong == []
    assert traffic.num_whole > elastic.NUM_CLIENTS


def tokens_of(folder: str, streams: Sequence[updates.Stream]) -> list[list[int]]:
    """What one process gives for the same requests, of which there are a few different ones."""
    wishes = list({(one.prompt, one.params) for one in streams})
    with LLM(folder, num_threads=1) as llm:
        outputs = llm.generate([prompt for prompt, _ in wishes], [params for _, params in wishes])
    found = {wish: output.outputs[0].token_ids for wish, output in zip(wishes, outputs, strict=True)}
    return [found[one.prompt, one.params] for one in streams]


@pytest.mark.slow
def test_an_update_ends_no_stream_and_changes_none(cluster: Serving, tmp_path: Path):
    """Other weights under a name while streams run: each is of one version. Then a canary that answers wrongly."""
    folders = [str(Path(bundled_model.__file__).parent / name) for name in ("model", "draft")]
    added = run_time.models("add", "demo", "--served-model-name", "other", "--replicas", "2")
    assert added.returncode == 0, added.stderr
    try:
        command = ("update", "other", "--model", folders[1])
        said, streams = asyncio.run(updates.traffic_during(cluster.routers, "other", *command))
        assert said.returncode == 0, said.stderr
        print(f"{said.stdout}{len(streams)} streams")
        assert [one.error for one in streams if one.error is not None] == []
        assert all(len(one.versions) == 1 and one.is_guaranteed for one in streams)
        old, new = streams[0].version, streams[-1].version
        assert {one.version for one in streams} == {old, new}
        assert old != new
        assert f"version {new} serves with 2 replicas; it was {old}" in said.stdout
        for version, folder in zip((old, new), folders, strict=True):
            of_version = [one for one in streams if one.version == version]
            assert [one.token_ids for one in of_version] == tokens_of(folder, of_version)
        right = updates.answer(cluster.routers[0], "other")
        known = tmp_path / "known.json"
        known.write_text(json.dumps([{"prompt": run_time.PROMPT, "starts_with": "no such answer"}]))
        canary = ("--canary", "0.5", "--known-answers", str(known))
        command = ("update", "other", "--model", folders[0], *canary)
        said, streams = asyncio.run(updates.traffic_during(cluster.routers, "other", *command))
        assert (said.returncode, "was rolled back: 1 wrong answers" in said.stderr) == (1, True), said.stderr
        assert [one.error for one in streams if one.error is not None] == []
        assert all(len(one.versions) == 1 and one.is_guaranteed for one in streams)
        assert updates.answer(cluster.routers[1], "other") == right
        assert streams[-1].version == new
    finally:
        removed = run_time.models("remove", "other")
    assert removed.returncode == 0, removed.stderr


@pytest.mark.slow
def test_an_update_audits_its_canary_while_streams_run(cluster: Serving):
    """By the checks of `holdfast verify`, over HTTP, beside other requests that the canary gets."""
    folders = [str(Path(bundled_model.__file__).parent / name) for name in ("model", "draft")]
    added = run_time.models("add", "demo", "--served-model-name", "other")
    assert added.returncode == 0, added.stderr
    try:
        canary = ("--canary", "0.5", "--canary-for", "2", "--min-requests", "1", "--audit")
        command = ("update", "other", "--model", folders[1], *canary)
        said, streams = asyncio.run(updates.traffic_during(cluster.routers, "other", *command))
        assert said.returncode == 0, said.stderr
        print(f"{said.stdout}{len(streams)} streams")
        (num_audited,) = re.findall(r"nothing was found by the audit of (\d+) answers", said.stdout)
        assert int(num_audited) > 100
        assert [one.error for one in streams if one.error is not None] == []
        old, new = streams[0].version, streams[-1].version
        assert {one.version for one in streams} == {old, new}
        for version, folder in zip((old, new), folders, strict=True):
            of_version = [one for one in streams if one.version == version]
            assert [one.token_ids for one in of_version] == tokens_of(folder, of_version)
    finally:
        removed = run_time.models("remove", "other")
    assert removed.returncode == 0, removed.stderr


@pytest.mark.slow
def test_operators_are_obeyed_by_all_routers(cluster: Serving, tmp_path: Path):
    """A pause and a drain are ordered at one router and hold at the other; a configuration is shown, then applied."""
    first, second = cluster.routers
    text = updates.answer(second, "demo")
    assert asyncio.run(operations.asked_while_paused(cluster.routers, "demo")) == (True, text)
    name = operations.dumped(first)["replicas"][0]["replica_id"]
    assert operations.holdfast("drain", name, "--server", first).returncode == 0
    asyncio.run(operations.until_all(cluster.routers, lambda state: retiring(state) == {name}))
    assert updates.answer(second, "demo") == text
    assert operations.holdfast("undrain", name, "--server", second).returncode == 0
    asyncio.run(operations.until_all(cluster.routers, lambda state: retiring(state) == set()))
    refused = operations.holdfast("drain", "nobody", "--server", first)
    assert (refused.returncode, "replica_id = 'nobody': must be one of" in refused.stderr) == (2, True)
    entries = [{"model": {"model": "demo"}, "replicas": 2, "parallel": {"tensor_parallel_size": 2}}]
    wanted = tmp_path / "wanted.yaml"
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    assert operations.apply(str(wanted), "--dry-run").stdout == "nothing differs\n"
    entries.append({"model": {"model": "demo", "served_model_name": "other"}})
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    shown = operations.apply(str(wanted), "--dry-run")
    assert (shown.returncode, ["other", "add"]) == (0, shown.stdout.split("\n")[1].split()[:2]), shown.stdout
    unsure = operations.apply(str(wanted))
    assert (unsure.returncode, "--yes" in unsure.stderr) == (2, True)
    done = operations.apply(str(wanted), "--yes")
    assert (done.returncode, "done: add other" in done.stdout) == (0, True), done.stderr
    assert updates.answer(first, "other") == updates.answer(second, "other")
    entries.pop()
    wanted.write_text(json.dumps({"cluster": {"models": entries}}))
    done = operations.apply(str(wanted), "--yes")
    assert (done.returncode, "done: remove other" in done.stdout) == (0, True), done.stderr
    assert asyncio.run(run_time.served_models(cluster.routers)) == [{"demo": 2}, {"demo": 2}]


@pytest.mark.slow
def test_other_settings_of_routers_end_no_stream(cluster: Serving, tmp_path: Path):
    """Routers are replaced one after the other under streams, at the same addresses."""
    entry = {"model": {"model": "demo"}, "replicas": 2, "parallel": {"tensor_parallel_size": 2}}

    def wanted(**sections: dict) -> str:
        path = tmp_path / "wanted.yaml"
        path.write_text(json.dumps({"cluster": {"models": [entry]}, **sections}))
        return str(path)

    def applied(*arguments: str, **sections: dict) -> tuple[Any, list[updates.Stream]]:
        act = functools.partial(operations.apply, wanted(**sections), *arguments)
        return asyncio.run(updates.traffic_while(cluster.routers, "demo", act))

    said, streams = applied("--yes", limits={"max_queued": 77})
    print(f"{said.stdout}{len(streams)} streams")
    assert (said.returncode, "done: replace routers" in said.stdout) == (0, True), said.stderr
    assert [one.error for one in streams if one.error is not None] == []
    folder = str(Path(bundled_model.__file__).parent / "model")
    assert [one.token_ids for one in streams] == tokens_of(folder, streams)
    assert [queue_length(router) for router in cluster.routers] == [77, 77]
    assert operations.apply(wanted(limits={"max_queued": 77}), "--dry-run").stdout == "nothing differs\n"
    said, streams = applied("--yes")
    assert said.returncode == 0, said.stderr
    assert [one.error for one in streams if one.error is not None] == []
    assert [queue_length(router) for router in cluster.routers] == [1024, 1024]


def queue_length(router: str) -> int:
    return operations.dumped(router)["settings"]["limits"]["max_queued"]


def retiring(state: dict) -> set[str]:
    return {one["replica_id"] for one in state["replicas"] if one["is_retiring"]}
