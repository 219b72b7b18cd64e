"""Every manifest of every overlay, without a cluster: its schema, and that names, ports, labels and Secrets agree."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.k8s.rendering import BUILDS, CLUSTERS, K8S, OVERLAYS, ROOT, manifests, of_kind, pods, quantity, ray_service
from tests.k8s.schemas import CORE, core_errors, custom_errors, group_of, has_schema, paths

EACH = pytest.mark.parametrize("build", BUILDS)
EACH_CLUSTER = pytest.mark.parametrize("build", CLUSTERS)
WITHOUT_SCHEMA = "monitoring.coreos.com"
"""The Prometheus operator's CRDs are not at hand: what is used of its kinds is checked below."""


@EACH
def test_core_kinds_have_no_unknown_field(build):
    checked = [one for one in manifests(build) if group_of(one) in CORE]
    assert checked
    assert not {one["metadata"]["name"]: errors for one in checked if (errors := core_errors(one))}


@EACH_CLUSTER
def test_pods_have_no_unknown_field(build):
    """The core kind that KubeRay makes of its own."""
    for pod in pods(build):
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": pod.labels}, "spec": pod.spec}
        assert core_errors(made) == [], pod.group


@EACH
def test_other_kinds_are_as_their_definitions_want_them(build, crds):
    others = [one for one in manifests(build) if group_of(one) not in (*CORE, WITHOUT_SCHEMA)]
    assert all(has_schema(crds, one) for one in others)
    assert not {one["kind"]: errors for one in others if (errors := custom_errors(crds, one))}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterDeletionDelaySecond"), 60),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "terminationGracePeriodSecs"), 60),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "2"),
    ],
)
def test_a_slip_in_a_ray_service_is_found(crds, path, value):
    broken = copy.deepcopy(ray_service("overlays/ha"))
    *way, last = path
    place = broken
    for step in way:
        place = place[step]
    place[last] = value
    assert any(str(last) in error for error in custom_errors(crds, broken))


def test_a_slip_in_a_core_kind_is_found():
    broken = copy.deepcopy(of_kind("overlays/ha", "PodDisruptionBudget")[0])
    broken["spec"]["minAvailible"] = 1
    assert core_errors(broken)


@EACH_CLUSTER
def test_services_lead_to_the_ports_of_routers_alone(build):
    made = pods(build)
    services = [one for one in of_kind(build, "Service") if "valkey" not in one["metadata"]["name"]]
    assert {one["metadata"]["name"] for one in services} == {"holdfast-grpc", "holdfast-http", "holdfast-routers"}
    for service in services:
        chosen = [pod for pod in made if pod.matches(service["spec"]["selector"])]
        assert {pod.group for pod in chosen} == {"routers"}
        for port in service["spec"]["ports"]:
            assert all(pod.ports[port["targetPort"]] == port["port"] for pod in chosen)


@EACH_CLUSTER
def test_grpc_services_say_that_they_speak_http2(build):
    wanted = "https" if build.endswith("auth-tls") else "kubernetes.io/h2c"
    ports = [port for one in of_kind(build, "Service") for port in one["spec"]["ports"] if port["name"] == "grpc"]
    assert [port["appProtocol"] for port in ports] == [wanted] * 2


@EACH_CLUSTER
def test_budgets_policies_and_monitors_choose_pods_that_there_are(build):
    made = pods(build)
    for one in (*of_kind(build, "PodDisruptionBudget"), *of_kind(build, "PodMonitor")):
        chosen = [pod for pod in made if pod.matches(one["spec"]["selector"])]
        assert chosen, one["metadata"]["name"]
        for endpoint in one["spec"].get("podMetricsEndpoints", []):
            assert all(endpoint["port"] in pod.ports for pod in chosen), one["metadata"]["name"]
        assert one["spec"].get("minAvailable", 0) <= len(chosen), "no pod could ever be evicted, or none be there"
    for policy in of_kind(build, "NetworkPolicy"):
        chosen = [pod for pod in made if pod.matches(policy["spec"]["podSelector"])]
        open_ports = {port for pod in chosen for port in pod.ports.values()} | {52365}
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])} <= open_ports


@EACH_CLUSTER
def test_clients_reach_both_ports_of_routers(build):
    (policy,) = [one for one in of_kind(build, "NetworkPolicy") if one["metadata"]["name"] == "holdfast-clients"]
    routers = [pod for pod in pods(build) if pod.matches(policy["spec"]["podSelector"])]
    assert routers
    for rule in policy["spec"]["ingress"]:
        opened = {port["port"] for port in rule["ports"]}
        assert all(opened == {pod.ports["grpc"], pod.ports["http"]} for pod in routers)


@EACH_CLUSTER
def test_no_eviction_takes_the_last_router_but_one_may_go(build):
    (budget,) = [one for one in of_kind(build, "PodDisruptionBudget") if one["metadata"]["name"] == "holdfast-routers"]
    routers = [pod for pod in pods(build) if pod.group == "routers"]
    assert 1 <= budget["spec"]["minAvailable"] < len(routers)


@EACH_CLUSTER
def test_probes_ask_ports_that_are_served(build):
    for pod in pods(build):
        for name in ("readinessProbe", "livenessProbe"):
            (ports,) = paths(pod.container[name], "port")
            assert ports in (*pod.ports, *pod.ports.values(), 52365), (pod.group, name)


@EACH_CLUSTER
def test_everything_that_a_pod_mounts_is_there(build):
    made = manifests(build)
    claims = {one["metadata"]["name"] for one in made if one["kind"] == "PersistentVolumeClaim"}
    accounts = {one["metadata"]["name"] for one in made if one["kind"] == "ServiceAccount"}
    for pod in pods(build):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        assert {mount["name"] for mount in pod.container["volumeMounts"]} == set(volumes)
        assert {claim["claimName"] for claim in paths(pod.spec, "persistentVolumeClaim")} <= claims
        assert pod.spec["serviceAccountName"] in accounts


@EACH_CLUSTER
def test_routes_lead_to_services_and_gateways_that_there_are(build):
    services = {(s["metadata"]["name"], port["port"]) for s in of_kind(build, "Service") for port in s["spec"]["ports"]}
    listeners = {
        (one["metadata"]["name"], listener["name"])
        for one in of_kind(build, "Gateway")
        for listener in one["spec"]["listeners"]
    }
    routes = of_kind(build, "GRPCRoute") + of_kind(build, "HTTPRoute")
    assert len(routes) == (2 if build.endswith("gateway") else 0)
    for route in routes:
        assert {(ref["name"], ref["sectionName"]) for ref in route["spec"]["parentRefs"]} <= listeners
        backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
        pools = {backend["name"] for backend in backends if backend.get("kind") == "InferencePool"}
        assert pools <= {one["metadata"]["name"] for one in of_kind(build, "InferencePool")}
        assert {(one["name"], one["port"]) for one in backends if one.get("kind") != "InferencePool"} <= services


@EACH_CLUSTER
def test_pools_are_of_routers_that_are_asked_to_pick(build):
    made = pods(build)
    for pool in of_kind(build, "InferencePool"):
        chosen = [pod for pod in made if pod.matches(pool["spec"]["selector"])]
        assert {pod.group for pod in chosen} == {"routers"}
        assert all({port["number"] for port in pool["spec"]["targetPorts"]} == {pod.ports["http"]} for pod in chosen)
        picker = pool["spec"]["endpointPickerRef"]
        (service,) = [one for one in of_kind(build, "Service") if one["metadata"]["name"] == picker["name"]]
        assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"}
        assert all(pod.environment["HOLDFAST_ROUTER__ENDPOINT_PICKER"] == "true" for pod in chosen)


def test_the_grpc_route_names_services_that_routers_serve():
    own = set()
    for text in (path.read_text() for path in (ROOT / "proto").rglob("*.proto")):
        package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)[1]
        own |= {f"{package}.{name}" for name in re.findall(r"^service (\w+)", text, re.MULTILINE)}
    (route,) = of_kind("overlays/gateway", "GRPCRoute")
    named = {match["method"]["service"] for rule in route["spec"]["rules"] for match in rule["matches"]}
    assert {name for name in named if "reflection" not in name} <= own
    assert "holdfast.v1.Inference" in named


@EACH_CLUSTER
def test_gcs_fault_tolerance_names_a_service_that_there_is(build):
    options = ray_service(build)["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
    if options is None:
        assert not build.endswith("/ha")
        return
    host, _, port = options["redisAddress"].partition(":")
    (service,) = [one for one in of_kind(build, "Service") if one["metadata"]["name"] == host]
    (server,) = of_kind(build, "StatefulSet")
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["port"] == int(port)
    (secret,) = paths(options, "secretKeyRef")
    assert secret in list(paths(template, "secretKeyRef"))


@EACH
def test_no_container_is_root_or_writes_its_image(build):
    templates = [pod.spec for pod in pods(build)] if build != "fetch-model" else []
    templates += [one["spec"]["template"]["spec"] for one in manifests(build) if one["kind"] in ("Job", "StatefulSet")]
    for spec in templates:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.get("hostNetwork")
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert quantity(container["resources"]["limits"]["memory"]) >= quantity(
                container["resources"]["requests"]["memory"]
            )


def installed(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


@EACH
def test_images_are_of_this_version_and_of_its_ray(build):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    flavour = "cuda" if "gpu" in build else "cpu"
    images = {image for image in paths(manifests(build), "image") if "valkey" not in image}
    assert images == {f"holdfast:{version}-ray{installed('ray')}-{flavour}"}
    for service in of_kind(build, "RayService"):
        assert service["spec"]["rayClusterConfig"]["rayVersion"] == installed("ray")


def test_every_component_and_file_is_used():
    for folder in ("base", *(f"components/{path.name}" for path in (K8S / "components").iterdir())):
        listed = (K8S / folder / "kustomization.yaml").read_text()
        for path in (K8S / folder).glob("*.yaml"):
            assert path.name == "kustomization.yaml" or path.name in listed, path
        users = [K8S / "overlays" / name / "kustomization.yaml" for name in OVERLAYS]
        assert any(f"../../{folder}" in path.read_text() for path in users), folder


def test_components_go_together(tmp_path: Path):
    """An overlay of one's own may take several."""
    own = K8S / "overlays"
    assert own.is_dir()
    everything = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../k8s/overlays/gpu-single"],
        "components": [
            f"../k8s/components/{name}" for name in ("ha", "autoscaling", "auth-tls", "gateway", "inference-pool")
        ],
    }
    (tmp_path / "k8s").symlink_to(K8S)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(everything))
    build = str(tmp_path / "own")
    assert ray_service(build)["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    (environment,) = of_kind(build, "ConfigMap")
    assert environment["data"]["HOLDFAST_CLUSTER__ROUTERS"] == "3"
    assert environment["data"]["HOLDFAST_SECURITY__INSECURE"] == "false"
    assert all("keys" in {volume["name"] for volume in pod.spec["volumes"]} for pod in pods(build))


@EACH_CLUSTER
def test_the_hosts_of_one_replica_are_drawn_to_one_nvlink_domain(build):
    """Only where a replica has several, and never so firmly that it could not start elsewhere."""
    group = ray_service(build)["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    affinity = group["template"]["spec"].get("affinity")
    assert (affinity is not None) == (group.get("numOfHosts", 1) > 1)
    if affinity is None:
        return
    (term,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert list(affinity) == ["podAffinity"]
    assert list(affinity["podAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    wanted = term["podAffinityTerm"]
    assert wanted["topologyKey"] == "nvidia.com/gpu.clique"
    assert wanted["matchLabelKeys"] == ["ray.io/worker-group-replica-name"], "one replica, and not all of the model"
    drawn = {pod.group for pod in pods(build) if pod.matches(wanted["labelSelector"])}
    assert drawn == {"replicas"}
