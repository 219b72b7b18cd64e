"""What differs between the models that run and a configuration."""

import json

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.difference import Changed, Kind, Running, difference


def config(*models: dict, **sections: dict) -> HoldfastConfig:
    return HoldfastConfig.model_validate({"cluster": {"models": list(models)}, **sections})


def entry(name: str, replicas: int = 1, **model: object) -> dict:
    return {"model": {"model": "demo", "served_model_name": name, **model}, "replicas": replicas}


def running(*models: dict) -> dict[str, Running]:
    """As replicas of these say it: over JSON, and with the threads that a start has chosen."""
    found = {}
    for one in config(*models).each_model:
        settings = json.loads(one.worker.model_dump_json())
        settings["parallel"]["num_threads"] = 1
        found[one.model.name] = Running(settings=settings, num_replicas=one.cluster.replicas)
    return found


def test_what_runs_as_it_is_wanted_needs_nothing():
    both = entry("a", 2), entry("b")
    assert difference(running(*both), config(*both)) == []


def test_each_kind_of_difference_is_one_step_and_nothing_goes_before_the_rest_is_there():
    now = running(entry("a"), entry("b"), entry("c"), entry("gone"))
    wanted = config(entry("a"), entry("b", max_model_len=128), entry("c", 3), entry("new", 2))
    steps = difference(now, wanted)
    assert [(step.kind, step.model) for step in steps] == [
        (Kind.ADD, "new"),
        (Kind.UPDATE, "b"),
        (Kind.SCALE, "c"),
        (Kind.REMOVE, "gone"),
    ]
    assert steps[1].changes == (Changed(name="model.max_model_len", before=None, after=128),)
    assert steps[2].changes == (Changed(name="cluster.replicas", before=1, after=3),)
    assert [step.config.model.name for step in steps[:3]] == ["new", "b", "c"]


def test_an_update_may_change_the_number_of_replicas_too():
    (step,) = difference(running(entry("a")), config(entry("a", 2, dtype="bfloat16")))
    assert [change.name for change in step.changes] == ["model.dtype", "cluster.replicas"]


def test_threads_count_where_they_are_given():
    (step,) = difference(running(entry("a")), config(entry("a"), parallel={"num_threads": 3}))
    assert step.changes == (Changed(name="parallel.num_threads", before=1, after=3),)


def test_where_the_load_decides_the_number_of_replicas_is_no_difference():
    scaled = {**entry("a", replicas=1), "scaling": {"max_replicas": 4}}
    wanted = HoldfastConfig.model_validate({"cluster": {"models": [scaled]}})
    assert difference(running(entry("a", replicas=3)), wanted) == []
