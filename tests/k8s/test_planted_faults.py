"""Faults planted into the manifests, one each: the check that is there for it must find it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.k8s import rendering, test_manifests, test_settings

WORKERS = ("spec", "rayClusterConfig", "workerGroupSpecs")
ROUTERS, REPLICAS = (*WORKERS, 0), (*WORKERS, 1)
POD = ("template", "spec")
CONTAINER = (*POD, "containers", 0)
SHM = (*POD, "volumes", 2, "emptyDir")
RAY_SERVICE = ("RayService", "holdfast")
GONE = object()

Place = tuple[str, str]
Way = tuple[str | int, ...]
Check = Callable[[str], None]

_manifests, _settings = test_manifests, test_settings
PORT = ("spec", "ports", 0)
FAULTS: list[tuple[str, str, Place, Way, Any, Check]] = [
    ("a selector that chooses nothing", "cpu-demo", ("Service", "holdfast-grpc"), ("spec", "selector"),
     {"holdfast/pool": "router"}, _manifests.test_services_lead_to_the_ports_of_routers_alone),
    ("a selector of other pods", "ha", ("Service", "holdfast-http"), ("spec", "selector"),
     {"holdfast/pool": "replicas"}, _manifests.test_services_lead_to_the_ports_of_routers_alone),
    ("a target port of another name", "ha", ("Service", "holdfast-http"), (*PORT, "targetPort"), "grpc",
     _manifests.test_services_lead_to_the_ports_of_routers_alone),
    ("another port than the routers'", "ha", ("Service", "holdfast-routers"), (*PORT, "port"), 50052,
     _manifests.test_services_lead_to_the_ports_of_routers_alone),
    ("gRPC without HTTP/2", "cpu-demo", ("Service", "holdfast-grpc"), (*PORT, "appProtocol"), "http",
     _manifests.test_grpc_services_say_that_they_speak_http2),
    ("gRPC in the clear where there is TLS", "auth-tls", ("Service", "holdfast-routers"), (*PORT, "appProtocol"),
     "kubernetes.io/h2c", _manifests.test_grpc_services_say_that_they_speak_http2),
    ("an image of another version", "cpu-demo", RAY_SERVICE, (*ROUTERS, *CONTAINER, "image"),
     "holdfast:0.0.9-ray2.60.0-cpu", _manifests.test_images_are_of_this_version_and_of_its_ray),
    ("an image for CPUs on GPUs", "gpu-single", RAY_SERVICE, (*REPLICAS, *CONTAINER, "image"),
     "holdfast:0.1.0-ray2.60.0-cpu", _manifests.test_images_are_of_this_version_and_of_its_ray),
    ("another Ray than the image's", "ha", RAY_SERVICE, ("spec", "rayClusterConfig", "rayVersion"), "2.59.0",
     _manifests.test_images_are_of_this_version_and_of_its_ray),
    ("a probe of a port that nobody serves", "ha", RAY_SERVICE,
     (*ROUTERS, *CONTAINER, "readinessProbe", "httpGet", "port"), 8001,
     _manifests.test_probes_ask_ports_that_are_served),
    ("a probe of a port of other pods", "ha", RAY_SERVICE,
     (*REPLICAS, *CONTAINER, "readinessProbe", "grpc", "port"), 50051,
     _manifests.test_probes_ask_ports_that_are_served),
    ("a probe of liveness for readiness", "ha", RAY_SERVICE,
     (*ROUTERS, *CONTAINER, "readinessProbe", "httpGet", "path"), "/version",
     _settings.test_readiness_asks_what_serves),
    ("a probe in the clear where there is TLS", "auth-tls", RAY_SERVICE,
     (*ROUTERS, *CONTAINER, "readinessProbe", "httpGet", "scheme"), "HTTP",
     _settings.test_readiness_asks_what_serves),
    ("a budget that lets nobody go", "cpu-demo", ("PodDisruptionBudget", "holdfast-routers"),
     ("spec", "minAvailable"), 2, _manifests.test_no_eviction_takes_the_last_router_but_one_may_go),
    ("a policy that shuts clients out", "cpu-demo", ("NetworkPolicy", "holdfast-clients"),
     ("spec", "ingress", 0, "ports"), [{"port": 8000}], _manifests.test_clients_reach_both_ports_of_routers),
    ("a policy for a port that nobody has", "cpu-demo", ("NetworkPolicy", "holdfast-clients"),
     ("spec", "ingress", 0, "ports", 0, "port"), 50052,
     _manifests.test_budgets_policies_and_monitors_choose_pods_that_there_are),
    ("a monitor of a port that nobody has", "ha", ("PodMonitor", "holdfast-routers"),
     ("spec", "podMetricsEndpoints", 0, "port"), "figures",
     _manifests.test_budgets_policies_and_monitors_choose_pods_that_there_are),
    ("a route to a port that no service has", "gateway", ("GRPCRoute", "holdfast"),
     ("spec", "rules", 0, "backendRefs", 0, "port"), 50052,
     _manifests.test_routes_lead_to_services_and_gateways_that_there_are),
    ("a route to a pool that is not there", "gateway", ("HTTPRoute", "holdfast"),
     ("spec", "rules", 0, "backendRefs", 0, "name"), "routers",
     _manifests.test_routes_lead_to_services_and_gateways_that_there_are),
    ("a pool of replicas", "gateway", ("InferencePool", "holdfast"), ("spec", "selector", "matchLabels"),
     {"holdfast/pool": "replicas"}, _manifests.test_pools_are_of_routers_that_are_asked_to_pick),
    ("a pool at the port of gRPC", "gateway", ("InferencePool", "holdfast"), ("spec", "targetPorts", 0, "number"),
     50051, _manifests.test_pools_are_of_routers_that_are_asked_to_pick),
    ("a picker at the port of HTTP", "gateway", ("InferencePool", "holdfast"),
     ("spec", "endpointPickerRef", "port", "number"), 8000,
     _manifests.test_pools_are_of_routers_that_are_asked_to_pick),
    ("a route to a service that is not there", "gateway", ("GRPCRoute", "holdfast"),
     ("spec", "rules", 0, "backendRefs", 0, "name"), "holdfast",
     _manifests.test_routes_lead_to_services_and_gateways_that_there_are),
    ("a route at a listener that is not there", "gateway", ("GRPCRoute", "holdfast"),
     ("spec", "parentRefs", 0, "sectionName"), "http",
     _manifests.test_routes_lead_to_services_and_gateways_that_there_are),
    ("a Secret of another name", "ha", RAY_SERVICE,
     ("spec", "rayClusterConfig", "gcsFaultToleranceOptions", "redisPassword", "valueFrom", "secretKeyRef", "name"),
     "redis", _manifests.test_gcs_fault_tolerance_names_a_service_that_there_is),
    ("a file beside its Secret", "auth-tls", RAY_SERVICE,
     (*REPLICAS, *CONTAINER, "volumeMounts", 4, "mountPath"), "/etc/holdfast/certificates",
     _settings.test_files_of_the_settings_come_from_secrets_that_every_pod_mounts),
    ("a Secret that may be written", "auth-tls", RAY_SERVICE,
     (*ROUTERS, *CONTAINER, "volumeMounts", 3, "readOnly"), False,
     _settings.test_files_of_the_settings_come_from_secrets_that_every_pod_mounts),
    ("a mount without its volume", "ha", RAY_SERVICE, (*ROUTERS, *CONTAINER, "volumeMounts", 0, "name"), "temporary",
     _manifests.test_everything_that_a_pod_mounts_is_there),
    ("a root file system that may be written", "ha", RAY_SERVICE,
     (*ROUTERS, *CONTAINER, "securityContext", "readOnlyRootFilesystem"), False,
     _manifests.test_no_container_is_root_or_writes_its_image),
    ("shared memory on a disk", "cpu-demo", RAY_SERVICE, (*REPLICAS, *SHM, "medium"), "",
     _settings.test_memory_holds_what_counts_as_memory),
    ("shared memory smaller than Ray's objects", "cpu-demo", RAY_SERVICE, (*REPLICAS, *SHM, "sizeLimit"), "64Mi",
     _settings.test_memory_holds_what_counts_as_memory),
    ("no shared memory", "cpu-demo", RAY_SERVICE, (*REPLICAS, *POD, "volumes", 2), GONE,
     _settings.test_memory_holds_what_counts_as_memory),
    ("a grace period below the drain", "ha", RAY_SERVICE, (*ROUTERS, *POD, "terminationGracePeriodSeconds"), 600,
     _settings.test_whatever_ends_waits_for_the_longest_generation),
    ("old pods that go before their streams", "ha", RAY_SERVICE, ("spec", "rayClusterDeletionDelaySeconds"), 60,
     _settings.test_whatever_ends_waits_for_the_longest_generation),
    ("pods smaller than a placement group", "ha", RAY_SERVICE, (*REPLICAS, "rayStartParams", "num-cpus"), "1",
     _settings.test_pods_of_replicas_are_as_large_as_their_placement_groups),
    ("fewer pods than replicas", "ha", RAY_SERVICE, (*REPLICAS, "replicas"), 1,
     _settings.test_pods_of_replicas_are_as_large_as_their_placement_groups),
    ("fewer pods than replicas may be asked for", "autoscaling", RAY_SERVICE, (*REPLICAS, "maxReplicas"), 4,
     _settings.test_pods_may_follow_as_far_as_replicas_are_scaled),
    ("fewer pods than routers", "ha", RAY_SERVICE, (*ROUTERS, "replicas"), 2,
     _settings.test_a_pod_has_room_for_one_router),
    ("a pool without its label", "ha", RAY_SERVICE, (*REPLICAS, "labels"), {"holdfast/pool": "replica"},
     _settings.test_every_pool_has_the_labels_that_are_asked_for_and_no_other_has),
    ("a head that works", "ha", RAY_SERVICE,
     ("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), "4",
     _settings.test_the_head_does_no_work),
    ("a port that the settings do not have", "ha", RAY_SERVICE, (*REPLICAS, *CONTAINER, "ports", 0, "containerPort"),
     50062, _settings.test_ports_of_pods_are_those_of_the_settings),
]  # fmt: skip


@pytest.fixture
def plant(monkeypatch) -> Iterator[Callable[..., None]]:
    """Puts one value into what kustomize has built."""

    def put(build: str, place: Place, way: Way, value: object) -> None:
        made = list(yaml.load_all(rendering._built(build), yaml.CSafeLoader))
        (target,) = [one for one in made if (one["kind"], one["metadata"]["name"]) == place]
        *steps, last = way
        for step in steps:
            target = target[step]
        if value is GONE:
            del target[last]
        else:
            assert target[last] != value, "this is what it says already"
            target[last] = value
        text = yaml.safe_dump_all(made)
        monkeypatch.setattr(rendering, "_built", lambda _: text)
        forget()

    def forget() -> None:
        rendering.manifests.cache_clear()
        rendering.pods.cache_clear()

    yield put
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("build", "place", "way", "value", "check"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_a_planted_fault_is_found(plant, build, place, way, value, check):
    check(f"overlays/{build}")
    plant(f"overlays/{build}", place, way, value)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check(f"overlays/{build}")
