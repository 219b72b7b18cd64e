"""The settings of a model's new version: what is given, over how the old one runs."""

import json

import pytest

from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import Setting
from holdfast.cluster.serve.models import over_running
from holdfast.cluster.serve.router_update import of_replica

TOLD = {
    "model": {"model": "demo", "max_model_len": 64},
    "scaling": {"max_replicas": 4, "target_ttft_s": 1.5},
    "cluster": {"engine_port": 0, "rank_labels": {"pool": "chat"}, "drain_timeout_s": 5.0},
}


def updated(message: str, **given: object) -> HoldfastConfig:
    layer = {path.replace("__", "."): Setting(value, "flag") for path, value in given.items()}
    return over_running(json.loads(message), load_config(layer, environ={}))


def test_what_is_not_given_stays_as_it_runs():
    """Scaling, and what the model has of the cluster's settings, too."""
    before = HoldfastConfig.model_validate(TOLD)
    after = updated(of_replica(before), scheduler__max_num_seqs=4)
    assert after.scheduler.max_num_seqs == 4
    assert after.model_copy(update={"scheduler": before.scheduler}) == before


def test_what_is_given_changes():
    after = updated(of_replica(HoldfastConfig.model_validate(TOLD)), scaling__max_replicas=6, cluster__engine_port=7000)
    assert (after.scaling.max_replicas, after.scaling.target_ttft_s) == (6, 1.5)
    assert (after.cluster.engine_port, after.cluster.drain_timeout_s) == (7000, 5.0)


def test_one_that_was_fitted_into_a_full_machine_is_fitted_anew():
    before = HoldfastConfig.model_validate(TOLD)
    fitted = before.cluster.model_copy(update={"cpus_per_rank": 0.0, "rank_resources": {"node:10.0.0.1": 0.001}})
    after = updated(of_replica(before.model_copy(update={"cluster": fitted})))
    assert after.cluster == before.cluster


def test_nothing_that_a_replica_tells_is_secret():
    secret = HoldfastConfig.model_validate({"client": {"api_key": "sesame"}})
    with pytest.raises(ValueError, match="not found"):
        of_replica(secret).index("sesame")
