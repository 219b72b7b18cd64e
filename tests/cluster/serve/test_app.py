import logging

import pytest
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

import holdfast
from holdfast.cluster.serve import app
from holdfast.cluster.serve.app import build_app
from holdfast.worker.errors import ConfigurationError

ARGS = {"parallel": {"tensor_parallel_size": 2}, "cluster": {"replicas": 2}}


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "node_resources", lambda: [{"CPU": 4.0}])


@pytest.mark.usefixtures("four_cpus")
def test_serve_can_build_the_application_from_the_args_of_its_own_config_file():
    built = call_user_app_builder_with_args_if_necessary(holdfast.build_app, ARGS)
    assert isinstance(built, serve.Application)


@pytest.mark.usefixtures("four_cpus")
def test_wrong_args_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"cluster.replica \(from build_app\); did you mean cluster.replicas"):
        build_app({"cluster": {"replica": 2}})


@pytest.mark.usefixtures("four_cpus")
def test_ranks_that_must_part_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_app(ARGS)
        assert caplog.text == ""
        build_app({"parallel": {"tensor_parallel_size": 8}})
    assert "do not fit on whole nodes" in caplog.text


@pytest.mark.usefixtures("four_cpus")
def test_resources_that_no_node_has_yet_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_app({"cluster": {"rank_resources": {"fast_disk": 1}, "router_resources": {"front_door": 2}}})
    assert "cluster.rank_resources: no node has 1 of fast_disk yet" in caplog.text
    assert "cluster.router_resources: no node has 2 of front_door yet" in caplog.text


@pytest.mark.usefixtures("four_cpus")
def test_every_rank_and_router_asks_for_its_resources():
    resources = {"rank_resources": {"fast_disk": 0.5}, "router_resources": {"front_door": 1}}
    router = build_app({"parallel": {"tensor_parallel_size": 2}, "cluster": resources})._bound_deployment
    replica = router.init_args[-1]._bound_deployment
    assert router.ray_actor_options == {"num_cpus": 1, "resources": {"front_door": 1.0}}
    assert replica._replica_config.placement_group_bundles == [{"CPU": 1.0, "fast_disk": 0.5}] * 2
