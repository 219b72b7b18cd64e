import pytest
import yaml

from holdfast.cluster.commands.cli import run
from holdfast.cluster.commands.estimate import GIB, MIB, PodResources, RankNeeds, serve_args
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.placement_groups import rank_bundle, whole_replicas

CPU = RankNeeds(weight_bytes=2 * GIB, cache_bytes=GIB, cpus=2.0, has_gpu=False)
GPU = RankNeeds(weight_bytes=40 * GIB, cache_bytes=0, cpus=4.0, has_gpu=True)


@pytest.mark.parametrize(("rank", "num_ranks", "hosts"), [(CPU, 1, 1), (CPU, 4, 1), (GPU, 8, 1), (GPU, 16, 2)])
def test_a_pod_holds_its_part_of_a_placement_group_and_no_more(rank, num_ranks, hosts):
    pod = PodResources.of(rank, num_ranks, ranks_per_host=8)
    assert pod.num_hosts == hosts
    config = HoldfastConfig.model_validate(serve_args(pod, rank))
    assert config.cluster.span_nodes == (hosts > 1)
    node = {"CPU": float(pod.group()["rayStartParams"]["num-cpus"])} | ({"GPU": float(pod.gpus)} if pod.gpus else {})
    bundle = rank_bundle(config.worker, config.cluster, [node])
    assert whole_replicas(bundle, num_ranks // hosts, [node]) == 1
    assert node == {name: amount * num_ranks // hosts for name, amount in bundle.items()}


def test_memory_holds_weights_cache_and_shared_memory():
    pod = PodResources.of(CPU, 4, ranks_per_host=8)
    assert pod.memory_bytes > 4 * (CPU.weight_bytes + CPU.cache_bytes) + pod.shm_bytes
    assert pod.shm_bytes > 4 * 64 * MIB, "sums between ranks"


def test_weights_on_a_gpu_take_no_memory_of_the_pod():
    large = RankNeeds(weight_bytes=160 * GIB, cache_bytes=0, cpus=4.0, has_gpu=True)
    assert PodResources.of(GPU, 8, 8).memory_bytes == PodResources.of(large, 8, 8).memory_bytes


def test_ranks_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="7 ranks cannot be shared out evenly among 2 hosts"):
        PodResources.of(GPU, 7, ranks_per_host=4)


def test_the_command_writes_a_group_and_the_settings_that_go_with_it(capsys):
    assert run(["estimate", "demo", "--tp", "2", "--device", "cpu", "--kv-cache-memory", "64MiB", "--k8s"]) == 0
    group, args = (yaml.safe_load(part) for part in capsys.readouterr().out.split("# serveConfigV2, args:"))
    config = HoldfastConfig.model_validate(args)
    assert config.parallel.tensor_parallel_size == 2
    assert 63 * MIB < config.cache.kv_cache_memory <= 64 * MIB, "whole blocks"
    assert group[0]["rayStartParams"]["num-cpus"] == "2"
    assert group[0]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "4Gi"


def test_the_command_spreads_ranks_over_hosts_of_a_size(capsys):
    assert run(["estimate", "demo", "--tp", "2", "--device", "cuda", "--k8s", "--ranks-per-host", "1"]) == 0
    assert "numOfHosts: 2" in capsys.readouterr().out
    assert run(["estimate", "demo", "--tp", "2", "--k8s", "--ranks-per-host", "0"]) == 2
