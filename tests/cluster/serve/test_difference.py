"""What differs between the models that run and a configuration."""

import json

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.canary import Changed, ChangeKind, Running, difference, in_order, router_difference
from holdfast.cluster.serve.router_update import of_replica, of_router, router_config


def config(*models: dict, **sections: dict) -> HoldfastConfig:
    return HoldfastConfig.model_validate({"cluster": {"models": list(models)}, **sections})


def entry(name: str, replicas: int = 1, **model: object) -> dict:
    return {"model": {"model": "demo", "served_model_name": name, **model}, "replicas": replicas}


def running(*models: dict) -> dict[str, Running]:
    """As replicas of these say it: over JSON, and with the threads that a start has chosen."""
    found = {}
    for one in config(*models).each_model:
        settings = json.loads(of_replica(one))
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
        (ChangeKind.ADD, "new"),
        (ChangeKind.UPDATE, "b"),
        (ChangeKind.SCALE, "c"),
        (ChangeKind.REMOVE, "gone"),
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
    assert difference(running({**scaled, "replicas": 3}), config(scaled)) == []


def test_other_limits_of_scaling_are_an_update():
    now = {**entry("a"), "scaling": {"max_replicas": 4}}
    wanted = {**entry("a"), "scaling": {"max_replicas": 6}}
    (step,) = difference(running(now), config(wanted))
    assert (step.kind, step.changes) == (ChangeKind.UPDATE, (Changed(name="scaling.max_replicas", before=4, after=6),))


def test_what_an_older_release_does_not_tell_is_not_compared():
    now = running(entry("a"))
    heard = {section: values for section, values in now["a"].settings.items() if section != "scaling"}
    scaled = {**entry("a"), "scaling": {"max_replicas": 4}}
    assert difference({"a": Running(settings=heard, num_replicas=1)}, config(scaled)) == []


def routers(**sections: dict) -> HoldfastConfig:
    """As routers say it."""
    return router_config(of_router(HoldfastConfig.model_validate(sections)))


def test_routers_that_run_as_they_are_wanted_need_nothing():
    sections = {"router": {"routing_policy": "random"}, "cluster": {"models": [entry("a")]}}
    now = routers(**sections, scheduler={"aging_s": 5.0, "max_num_seqs": 4})
    then = HoldfastConfig.model_validate({**sections, "scheduler": {"aging_s": 5.0}})
    assert router_difference(now, then, lambda path: True) == ([], [])


def test_routers_are_replaced_for_what_concerns_them_between_additions_and_removals():
    now = routers(cluster={"port": 6000, "drain_timeout_s": 20.0})
    wanted = HoldfastConfig.model_validate(
        {"limits": {"max_queued": 7}, "scheduler": {"tenant_shares": "a=2"}, "model": {"max_model_len": 64}}
    )
    (step,), fixed = router_difference(now, wanted, lambda path: False)
    assert (step.kind, step.model, fixed) == (ChangeKind.REPLACE, "routers", [])
    assert [change.name for change in step.changes] == ["limits.max_queued", "scheduler.tenant_shares"]
    assert step.config is not None
    assert (step.config.limits.max_queued, step.config.cluster.port) == (7, 6000)
    assert step.config.cluster.drain_timeout_s == 20.0, "what the file does not say of the cluster stays"
    steps = in_order([*difference(running(entry("a")), config(entry("b"))), step])
    assert [one.kind for one in steps] == [ChangeKind.ADD, ChangeKind.REPLACE, ChangeKind.REMOVE]


def test_of_the_cluster_only_what_is_given_counts_and_addresses_need_a_restart():
    now = routers(cluster={"port": 6000, "routers": 2})
    wanted = HoldfastConfig.model_validate({"cluster": {"port": 7000, "routers": 3}, "security": {"insecure": True}})
    (step,), fixed = router_difference(now, wanted, lambda path: True)
    assert step.changes == (Changed(name="cluster.routers", before=2, after=3),)
    assert [change.name for change in fixed] == ["cluster.port", "security.insecure"]
    assert router_difference(now, wanted, lambda path: False) == ([], [])
