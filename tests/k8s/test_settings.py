"""What a manifest says and what its pods would do with it: settings, resources, times and files fit each other."""

import importlib
import math

import pytest
from ray.serve.schema import ServeDeploySchema

from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.serve.app import HEALTH_CHECK_PERIOD_S
from holdfast.cluster.serve.placement_groups import ANY_INTERFACE, rank_bundle, whole_replicas
from holdfast.cluster.serve.ray_internals import check_labels
from holdfast.cluster.serve.replica_deployment import STOP_S
from holdfast.cluster.serve.security import check_exposed
from tests.k8s.rendering import CLUSTERS, of_kind, pods, quantity, ray_service, serve_config
from tests.k8s.schemas import paths

EACH_CLUSTER = pytest.mark.parametrize("build", CLUSTERS)
END_S = 20.0
"""What a pod takes beyond its drain: Ray's own processes."""


def settings(build: str) -> HoldfastConfig:
    """As `build_app` reads them in a pod: the pod's environment, and `args` over it."""
    (application,) = serve_config(build)["applications"]
    head = pods(build)[0]
    return load_config(mapping_layer(HoldfastConfig, application["args"], "args"), environ=head.environment).config


def group(build: str, name: str):
    return [pod for pod in pods(build) if pod.group == name]


@EACH_CLUSTER
def test_serve_takes_the_config_and_our_settings_are_valid(build):
    config = ServeDeploySchema.model_validate(serve_config(build))
    (application,) = config.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert application.name == settings(build).cluster.namespace, "build_model and the directory are found by it"
    assert application.route_prefix is None
    check_exposed(settings(build).security, ANY_INTERFACE)


@EACH_CLUSTER
def test_a_setting_is_said_once(build):
    """What is in the environment, `args` must not say: it would hide it from whoever changes the environment."""
    (application,) = serve_config(build)["applications"]
    said = set(mapping_layer(HoldfastConfig, application["args"], "args"))
    environment = {name.removeprefix("HOLDFAST_").lower().replace("__", ".") for name in pods(build)[0].environment}
    assert not said & environment


@EACH_CLUSTER
def test_pods_have_one_environment(build):
    ours = [{k: v for k, v in pod.environment.items() if k.startswith("HOLDFAST_")} for pod in pods(build)]
    assert all(one == ours[0] for one in ours), "the application is built on whichever pod Serve chooses"


@EACH_CLUSTER
def test_ports_of_pods_are_those_of_the_settings(build):
    cluster = settings(build).cluster
    assert all(
        (pod.ports["grpc"], pod.ports["http"]) == (cluster.port, cluster.http_port) for pod in group(build, "routers")
    )
    assert all(pod.ports["engine"] == cluster.engine_port for pod in group(build, "replicas"))


@EACH_CLUSTER
def test_serve_has_no_proxies_so_every_pod_has_its_own_probes(build):
    """KubeRay's readiness of a worker asks Serve's proxy, at the port that our routers have."""
    assert serve_config(build)["proxy_location"] == "Disabled"
    assert ray_service(build)["spec"]["excludeHeadPodFromServeSvc"] is True
    assert all({"readinessProbe", "livenessProbe"} <= set(pod.container) for pod in pods(build))


@EACH_CLUSTER
def test_readiness_asks_what_serves(build):
    (router, replica) = (group(build, name)[0].container["readinessProbe"] for name in ("routers", "replicas"))
    assert router["httpGet"]["path"] == "/ready"
    has_tls = settings(build).security.tls_cert is not None
    assert router["httpGet"].get("scheme") == ("HTTPS" if has_tls else None)
    asked = "httpGet" if "multi-node" in build else "tcpSocket" if has_tls else "grpc"
    assert asked in replica


@EACH_CLUSTER
def test_the_head_does_no_work(build):
    head = pods(build)[0]
    assert head.resources["CPU"] == head.resources["GPU"] == 0


@EACH_CLUSTER
def test_every_pool_has_the_labels_that_are_asked_for_and_no_other_has(build):
    cluster = settings(build).cluster
    for setting, selector, name in (
        ("cluster.rank_labels", cluster.rank_labels, "replicas"),
        ("cluster.router_labels", cluster.router_labels, "routers"),
    ):
        check_labels(setting, selector)
        assert selector
        assert {pod.group for pod in pods(build) if selector.items() <= pod.ray_labels.items()} == {name}


@EACH_CLUSTER
def test_a_pod_has_room_for_one_router(build):
    cluster, routers = settings(build).cluster, group(build, "routers")
    assert len(routers) == cluster.routers
    assert all(pod.resources["CPU"] == 1 for pod in routers)


@EACH_CLUSTER
def test_pods_of_replicas_are_as_large_as_their_placement_groups(build):
    """One pod, or one group of hosts, is one replica with nothing left over."""
    config = settings(build)
    num_ranks, replicas = config.parallel.tensor_parallel_size, group(build, "replicas")
    nodes = [pod.resources for pod in replicas]
    bundle = rank_bundle(config.worker, config.cluster, nodes)
    hosts = ray_service(build)["spec"]["rayClusterConfig"]["workerGroupSpecs"][1].get("numOfHosts", 1)
    assert config.cluster.span_nodes == (hosts > 1)
    assert len(replicas) == config.cluster.replicas * hosts
    assert whole_replicas(bundle, num_ranks // hosts, nodes) == len(nodes)
    assert all(pod.resources[name] * hosts == num_ranks * amount for pod in replicas for name, amount in bundle.items())


@EACH_CLUSTER
def test_devices_and_threads_are_said_since_pods_show_the_cores_of_their_host(build):
    config = settings(build)
    assert config.model.device == ("cuda" if "gpu" in build else "cpu"), (
        "the first pods may be up before those with GPUs"
    )
    for pod in group(build, "replicas"):
        ranks = config.parallel.tensor_parallel_size * config.cluster.replicas / len(group(build, "replicas"))
        assert config.parallel.num_threads is not None
        assert config.parallel.num_threads * ranks <= quantity(pod.container["resources"]["limits"]["cpu"])
    if config.model.device == "cpu":
        assert config.cache.kv_cache_memory is not None


@EACH_CLUSTER
def test_memory_holds_what_counts_as_memory(build):
    """Shared memory and Ray's object store are taken of a pod's limit."""
    config = settings(build)
    for pod in pods(build):
        limit = quantity(pod.container["resources"]["limits"]["memory"])
        (shm,) = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        store = int(pod.start.split("--object-store-memory=")[1].split()[0])
        assert store < quantity(shm["sizeLimit"]) <= limit / 4
        if pod.group == "replicas" and config.cache.kv_cache_memory is not None:
            assert config.cache.kv_cache_memory * config.parallel.tensor_parallel_size < limit / 2


@EACH_CLUSTER
def test_whatever_ends_waits_for_the_longest_generation(build):
    config, service = settings(build), ray_service(build)
    longest_s, drain_s = config.limits.max_timeout_s, config.cluster.drain_timeout_s
    assert drain_s >= longest_s >= config.limits.default_timeout_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest_s
    for pod in pods(build):
        command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["holdfast", "drain-node"]
        notice_s, limit_s = (float(command[command.index(flag) + 1]) for flag in ("--notice-s", "--limit-s"))
        assert limit_s >= notice_s + drain_s + STOP_S + math.ceil(HEALTH_CHECK_PERIOD_S)
        assert pod.spec["terminationGracePeriodSeconds"] >= limit_s + END_S


@EACH_CLUSTER
def test_files_of_the_settings_come_from_secrets_that_every_pod_mounts(build):
    files = [
        str(path) for path in settings(build).security.model_dump().values() if not isinstance(path, bool) and path
    ]
    assert len(files) == (7 if build.endswith("auth-tls") else 0)
    for pod in pods(build):
        secrets = {volume["name"] for volume in pod.spec["volumes"] if "secret" in volume}
        mounts = [mount for mount in pod.container["volumeMounts"] if mount["name"] in secrets]
        assert all(mount["readOnly"] for mount in mounts)
        assert all(any(file.startswith(f"{mount['mountPath']}/") for mount in mounts) for file in files), pod.group


@EACH_CLUSTER
def test_models_lie_where_every_pod_mounts_them(build):
    folder = settings(build).model.model
    if folder == "demo":
        return
    for pod in pods(build):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        assert folder.startswith("/models/")
        assert mounts["/models"] == "models"


@EACH_CLUSTER
def test_what_must_be_written_is_a_volume(build):
    for pod in pods(build):
        writable = {m["mountPath"] for m in pod.container["volumeMounts"] if not m.get("readOnly")}
        assert writable == {"/tmp", "/home/holdfast", "/dev/shm"}


@EACH_CLUSTER
def test_what_kuberay_refuses_is_not_there(build):
    """Its `ValidateRayClusterSpec` and `ValidateRayServiceSpec` of 1.7."""
    service = ray_service(build)
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(service["metadata"]["name"]) <= 41
    assert service["spec"].get("upgradeStrategy", {}).get("type", "NewCluster") == "NewCluster"
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= 0
    for one in groups:
        params = one["rayStartParams"]
        assert "labels" not in params
        assert not (one.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(params))
        assert "restartPolicy" not in one["template"]["spec"], "the autoscaler wants Never, and KubeRay sets it"
    environment = {variable["name"] for variable in paths(groups, "env") for variable in variable}
    assert not environment & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"}
    assert not {"redis-password", "redis-username"} & set(cluster["headGroupSpec"]["rayStartParams"])
    names = [one["groupName"] for one in cluster["workerGroupSpecs"]]
    assert len(set(names)) == len(names)
    for one in cluster["workerGroupSpecs"]:
        assert one["minReplicas"] <= one["replicas"] <= one["maxReplicas"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 53, 0), "tokens, and health on one path"


@EACH_CLUSTER
def test_pods_may_follow_as_far_as_replicas_are_scaled(build):
    (application,) = serve_config(build)["applications"]
    scaling, group = settings(build).scaling, ray_service(build)["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert scaling.is_on == build.endswith(("autoscaling", "disaggregated"))
    assert scaling.is_on != application.get("external_scaler_enabled", False), "Serve refuses both"
    if scaling.is_on:
        assert (scaling.min_replicas, scaling.max_replicas) == (group["minReplicas"], group["maxReplicas"])


def test_the_autoscaler_may_add_replicas_and_asks_kubernetes_by_its_account():
    cluster = ray_service("overlays/autoscaling")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    replicas = cluster["workerGroupSpecs"][1]
    assert replicas["maxReplicas"] > replicas["minReplicas"]
    assert cluster["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"]


def test_replicas_have_roles_and_links_for_their_blocks():
    """At the least number of replicas too there is one for each role, and pods reach each other on every port."""
    build = "overlays/disaggregated"
    router, scaling = settings(build).router, settings(build).scaling
    assert (router.prefill_replicas, router.decode_replicas) == (1, 1)
    assert scaling.min_replicas >= router.prefill_replicas + router.decode_replicas
    assert settings(build).cache.kv_transfer
    assert settings(build).scaling.is_on
    policy = next(one for one in of_kind(build, "NetworkPolicy") if one["metadata"]["name"] == "holdfast-cluster")
    assert "ports" not in policy["spec"]["ingress"][0]
