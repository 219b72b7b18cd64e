import pytest

from holdfast.cluster.config.config import ClusterConfig
from holdfast.cluster.serve.placement_groups import rank_bundle, unmet, whole_replicas
from holdfast.cluster.serve.ray_internals import check_labels
from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError

CPU_RANK = {"CPU": 1.0}
GPU_RANK = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "expected"),
    [
        (2, [{"CPU": 4.0}], 2),
        (2, [{"CPU": 2.0}, {"CPU": 2.0}], 2),
        (2, [{"CPU": 3.0}, {"CPU": 1.0}], 1),
        (4, [{"CPU": 2.0}, {"CPU": 2.0}], 0),
        (1, [{"memory": 1e9}], 0),
    ],
)
def test_whole_replicas_are_counted_node_by_node(num_ranks, nodes, expected):
    assert whole_replicas(CPU_RANK, num_ranks, nodes) == expected


def test_the_scarcest_resource_decides():
    assert whole_replicas(GPU_RANK, 4, [{"CPU": 64.0, "GPU": 4.0}]) == 1


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("auto", [{"CPU": 4.0}], CPU_RANK),
        ("auto", [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}], GPU_RANK),
        ("cpu", [{"CPU": 4.0, "GPU": 1.0}], CPU_RANK),
        ("cuda", [{"CPU": 4.0}], GPU_RANK),
    ],
)
def test_a_rank_takes_a_gpu_where_there_are_any(device, nodes, expected):
    config = WorkerConfig(model=ModelConfig(device=device))
    assert rank_bundle(config, ClusterConfig(), nodes) == expected


H100 = "accelerator_type:H100"


@pytest.mark.parametrize(
    ("nodes", "num_gpus"),
    [
        ([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "quiet": 2.0}], 0),
        ([{"CPU": 4.0, "GPU": 1.0, "quiet": 2.0}, {"CPU": 4.0}], 1),
        ([{"CPU": 4.0, "GPU": 1.0}], 1),
    ],
    ids=["its nodes have none", "its nodes have some", "its nodes are still to come"],
)
def test_a_rank_asks_for_custom_resources_and_for_a_gpu_where_nodes_with_these_have_one(nodes, num_gpus):
    config = ClusterConfig(rank_resources={"quiet": 0.5})
    bundle = rank_bundle(WorkerConfig(), config, nodes)
    assert bundle == {"CPU": 1.0, "quiet": 0.5} | ({"GPU": 1.0} if num_gpus else {})


def test_custom_resources_limit_how_many_replicas_stay_whole():
    bundle = {"CPU": 1.0, H100: 0.5}
    nodes = [{"CPU": 64.0, H100: 1.0}, {"CPU": 64.0}]
    assert whole_replicas(bundle, 2, nodes) == 1


def test_what_no_single_node_has_is_told():
    nodes = [{"CPU": 4.0, "quiet": 1.0}, {"CPU": 4.0, "quiet": 1.0}]
    assert unmet({"quiet": 1.0}, nodes) == []
    assert unmet({"quiet": 2.0, H100: 0.001}, nodes) == ["quiet", H100]


@pytest.mark.parametrize("value", ["chat", "!chat", "in(chat,code)", "!in(chat)"])
def test_nodes_are_selected_by_labels_as_ray_does(value):
    check_labels("cluster.rank_labels", {"holdfast/pool": value})


@pytest.mark.parametrize("labels", [{"pool": "a b"}, {"a/b/c": "d"}, {"pool": "near(chat)"}])
def test_labels_that_ray_cannot_select_by_are_refused_by_name(labels):
    with pytest.raises(ConfigurationError, match=r"cluster\.router_labels = "):
        check_labels("cluster.router_labels", labels)
