import pytest

from cluster.placement import choose_strategy, rank_bundle
from worker.config import ModelConfig, WorkerConfig

CPU_RANK = {"CPU": 1.0}
GPU_RANK = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "nodes", "expected"),
    [
        (2, 2, [{"CPU": 4.0}], "STRICT_PACK"),
        (2, 2, [{"CPU": 2.0}, {"CPU": 2.0}], "STRICT_PACK"),
        (2, 2, [{"CPU": 3.0}, {"CPU": 1.0}], "PACK"),
        (4, 1, [{"CPU": 2.0}, {"CPU": 2.0}], "PACK"),
        (1, 1, [{"memory": 1e9}], "PACK"),
    ],
)
def test_replicas_stay_whole_where_they_fit(num_ranks, num_replicas, nodes, expected):
    assert choose_strategy(CPU_RANK, num_ranks, num_replicas, nodes) == expected


def test_the_scarcest_resource_decides():
    node = {"CPU": 64.0, "GPU": 4.0}
    assert choose_strategy(GPU_RANK, 4, 1, [node]) == "STRICT_PACK"
    assert choose_strategy(GPU_RANK, 4, 2, [node]) == "PACK"


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
    assert rank_bundle(config, 1.0, nodes) == expected
