"""Our policy as Serve's controller hosts it: as Serve pickles it, fed by the directory, harmless in failure."""

from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.scaling.demand_book import ScalingConfig
from holdfast.cluster.serve import app
from holdfast.cluster.serve.scaling_policy import ScalingPolicy
from holdfast.router.demand import ModelDemand, ReplicaDemand


@pytest.fixture
def config() -> AutoscalingConfig:
    scaling = ScalingConfig(max_replicas=4, min_replicas=0, zero_after_s=0.0)
    options = app.number_of_replicas(HoldfastConfig(scaling=scaling, cluster=ClusterConfig(replicas=2)))
    return options["autoscaling_config"]


@pytest.fixture
def policy(config: AutoscalingConfig, monkeypatch: pytest.MonkeyPatch) -> ScalingPolicy:
    """As the controller makes it, without a directory to ask."""
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    made = cloudpickle.loads(config.policy.get_serialized_policy_def())
    return made(**config.policy.policy_kwargs)


def context(target: int, config: AutoscalingConfig | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        target_num_replicas=target,
        current_num_replicas=target,
        app_name="holdfast:demo",
        running_replicas=[SimpleNamespace(unique_id="r")] * min(target, 1),
        total_num_requests=0,
        policy_state={},
        config=config,
    )


def test_serve_is_told_the_limits_and_adds_no_delay_of_its_own(config):
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 2, 4)
    assert config.upscale_delay_s == config.downscale_delay_s == config.downscale_to_zero_delay_s == 0
    assert app.number_of_replicas(HoldfastConfig(cluster=ClusterConfig(replicas=3))) == {"num_replicas": 3}


def test_each_thing_that_is_heard_is_decided_about_once(policy, config):
    decide = _apply_autoscaling_config(policy)
    assert decide(context(0, config))[0] == 0
    policy._latest["heard"] = (ModelDemand(model="demo", num_open=2, num_queued=2), {})
    assert decide(context(0, config))[0] == 1
    replica = ReplicaDemand(replica_id="r", num_running=0, num_waiting=0, num_waiting_tokens=0, kv_use=0.0)
    policy._latest["heard"] = (ModelDemand(model="demo", replicas=(replica,)), {})
    assert decide(context(1, config))[0] == 0
    assert decide(context(1, config))[0] == 1, "nothing new was heard"
    policy._latest["heard"] = (None, {})
    assert decide(context(3, config))[0] == 3


def test_replicas_of_another_deployment_of_the_model_are_not_its_own(policy, config):
    """Their load is theirs: an update has two deployments of one model for a while."""
    busy = ReplicaDemand(replica_id="other", num_running=64, num_waiting=0, num_waiting_tokens=0, kv_use=1.0)
    own = ReplicaDemand(replica_id="r", num_running=1, num_waiting=0, num_waiting_tokens=0, kv_use=0.0)
    for _ in range(5):
        policy._latest["heard"] = (ModelDemand(model="demo", num_open=65, replicas=(busy, own)), {})
        assert policy(context(1, config))[0] == 1


def test_a_number_that_an_update_has_set_holds_whatever_the_load(policy, config):
    busy = ModelDemand(model="demo", num_open=9, num_queued=9)
    policy._latest["heard"] = (busy, {"holdfast:demo": 3, "holdfast:demo#2": 1})
    assert policy(context(2, config)) == (3, {})


def test_a_fault_of_ours_changes_nothing(policy, config):
    policy._latest["heard"] = ("nonsense",)
    assert policy(context(2, config)) == (2, {})
