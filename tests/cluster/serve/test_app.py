import logging

import pytest
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

import holdfast
from holdfast.cluster.serve import app, rank_placement
from holdfast.cluster.serve.app import build_app
from holdfast.cluster.serve.rank_placement import Node
from holdfast.worker.errors import ConfigurationError


def bound_replicas(application):
    """The replicas' deployments of a cluster's application."""
    return [replicas._bound_deployment for replicas in application._bound_deployment.init_args[3:]]


OPEN = {"security": {"insecure": True}}
"""An application listens on every interface."""
ARGS = {"parallel": {"tensor_parallel_size": 2}, "cluster": {"replicas": 2}} | OPEN


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (app, rank_placement):
        monkeypatch.setattr(module, "node_resources", lambda: [{"CPU": 4.0}])


@pytest.mark.usefixtures("four_cpus")
def test_serve_can_build_the_application_from_the_args_of_its_own_config_file():
    built = call_user_app_builder_with_args_if_necessary(holdfast.build_app, ARGS)
    assert isinstance(built, serve.Application)


@pytest.mark.usefixtures("four_cpus")
def test_wrong_args_are_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"cluster.replica \(from build_app\); did you mean cluster.replicas"):
        build_app({"cluster": {"replica": 2}})


def strategy_of(args):
    (replica,) = bound_replicas(build_app(args | OPEN))
    return replica._replica_config.placement_group_strategy


@pytest.mark.usefixtures("four_cpus")
def test_a_replica_lies_on_one_node_and_waits_for_it(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert strategy_of(ARGS) == "STRICT_PACK"
        assert caplog.text == ""
        assert strategy_of({"parallel": {"tensor_parallel_size": 8}}) == "STRICT_PACK"
    assert "1 replicas of 8 ranks do not fit on whole nodes, which have room for 0: the others wait" in caplog.text


@pytest.mark.usefixtures("four_cpus")
def test_a_replica_spans_nodes_only_if_asked_and_slow_links_are_warned_of(caplog: pytest.LogCaptureFixture):
    spanning = {"cluster": {"span_nodes": True}}
    with caplog.at_level(logging.WARNING):
        assert strategy_of({"parallel": {"tensor_parallel_size": 4}} | spanning) == "PACK"
        assert caplog.text == ""
        assert strategy_of({"parallel": {"tensor_parallel_size": 8}} | spanning) == "PACK"
    assert "may talk over the network in every layer, which is slow" in caplog.text


@pytest.mark.usefixtures("four_cpus")
def test_ranks_and_routers_go_to_nodes_with_their_labels():
    labels = {"rank_labels": {"pool": "replicas", "zone": "!a"}, "router_labels": {"pool": "routers"}}
    args = {"parallel": {"tensor_parallel_size": 2}, "cluster": labels} | OPEN
    router = build_app(args)._bound_deployment
    (replica,) = bound_replicas(build_app(args))
    assert router.ray_actor_options["label_selector"] == {"pool": "routers"}
    assert replica._replica_config.placement_group_bundle_label_selector == [{"pool": "replicas", "zone": "!a"}] * 2


@pytest.mark.usefixtures("four_cpus")
def test_ranks_go_to_one_domain_of_fast_links(monkeypatch, caplog: pytest.LogCaptureFixture):
    two = {"CPU": 2.0}
    nodes = [Node(labels={"rack": name}, total=two, free=two) for name in ("a", "b", "b", "c")]
    selected: list[object] = []
    monkeypatch.setattr(rank_placement, "known_nodes", lambda selector: selected.append(selector) or nodes)
    labels = {"span_nodes": True, "domain_label": "rack", "rank_labels": {"pool": "replicas"}}
    args = {"parallel": {"tensor_parallel_size": 4}, "cluster": labels} | OPEN
    (replica,) = bound_replicas(build_app(args))
    assert replica._replica_config.placement_group_bundle_label_selector == [{"pool": "replicas", "rack": "b"}] * 4
    assert selected == [{"pool": "replicas"}]
    assert "slow" not in caplog.text
    assert bound_replicas(build_app(args))[0].init_kwargs["domain_label"] == "rack", "the replica says where it lies"
    args["parallel"] = {"tensor_parallel_size": 6}
    (replica,) = bound_replicas(build_app(args))
    assert replica._replica_config.placement_group_bundle_label_selector == [{"pool": "replicas"}] * 6
    assert "1 replicas of 6 ranks do not fit into one domain of cluster.domain_label = rack" in caplog.text


@pytest.mark.parametrize(
    ("cluster", "limit"),
    [
        ({"domain_label": "rack"}, "needs span_nodes"),
        ({"domain_label": "rack", "span_nodes": True, "rank_labels": {"rack": "a"}}, "must not be in rank_labels"),
        ({"domain_label": "a b", "span_nodes": True}, "domain_label"),
    ],
)
@pytest.mark.usefixtures("four_cpus")
def test_a_domain_label_that_cannot_mean_anything_is_refused(cluster, limit, monkeypatch):
    monkeypatch.setattr(rank_placement, "known_nodes", lambda selector: [])
    with pytest.raises(ConfigurationError, match=rf"cluster.*{limit}"):
        build_app({"cluster": cluster} | OPEN)


@pytest.mark.usefixtures("four_cpus")
def test_resources_that_no_node_has_yet_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_app({"cluster": {"rank_resources": {"fast_disk": 1}, "router_resources": {"front_door": 2}}} | OPEN)
    assert "cluster.rank_resources: no node has 1 of fast_disk yet" in caplog.text
    assert "cluster.router_resources: no node has 2 of front_door yet" in caplog.text


@pytest.mark.usefixtures("four_cpus")
def test_every_rank_and_router_asks_for_its_resources():
    resources = {"rank_resources": {"fast_disk": 0.5}, "router_resources": {"front_door": 1}}
    args = {"parallel": {"tensor_parallel_size": 2}, "cluster": resources} | OPEN
    router = build_app(args)._bound_deployment
    (replica,) = bound_replicas(build_app(args))
    assert router.ray_actor_options == {"num_cpus": 1, "resources": {"front_door": 1.0}}
    assert replica._replica_config.placement_group_bundles == [{"CPU": 1.0, "fast_disk": 0.5}] * 2


@pytest.mark.usefixtures("four_cpus")
def test_each_of_several_models_has_replicas_of_its_own():
    entries = [{"model": {"model": "./a"}, "replicas": 2}, {"model": {"model": "./b"}, "cpus_per_rank": 0.5}]
    one, other = bound_replicas(build_app({"cluster": {"models": entries}} | OPEN))
    assert [one.name, other.name] == ["Replica:a", "Replica:b"]
    assert [one._deployment_config.num_replicas, other._deployment_config.num_replicas] == [2, 1]
    assert other._replica_config.placement_group_bundles == [{"CPU": 0.5}]


@pytest.mark.usefixtures("four_cpus")
def test_one_more_model_is_an_application_that_names_its_cluster():
    built = holdfast.build_model({"model": {"model": "./b"}, "cluster": {"namespace": "ours"}})
    worker, _, _, directory, *_ = built._bound_deployment.init_args
    assert (worker.model.name, directory) == ("b", "ours")
    with pytest.raises(ConfigurationError, match=r"cluster\.models: build_model makes the application of one model"):
        holdfast.build_model({"cluster": {"models": "./a,./b"}})


@pytest.mark.usefixtures("four_cpus")
def test_an_application_that_anybody_could_reach_is_refused_unless_it_asks_for_keys_or_is_wanted_so(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cluster\.host = '0\.0\.0\.0'.*keys add.*--insecure.*127\.0\.0\.1"):
        build_app({})
    for fine in (OPEN, {"cluster": {"host": "127.0.0.1"}}, {"security": {"api_keys": str(tmp_path / "keys.json")}}):
        assert build_app(fine)


@pytest.mark.usefixtures("four_cpus")
def test_the_token_of_a_cluster_is_handed_over_and_never_shown():
    def security_of(application):
        return application._bound_deployment.init_args[2]._bound_deployment.init_args[0]

    one, other = security_of(build_app(OPEN)), security_of(build_app(OPEN))
    assert one.token != other.token
    assert len(one.token) >= 43
    for text in (repr(one), str(one), repr(one.links)):
        assert one.token not in text
