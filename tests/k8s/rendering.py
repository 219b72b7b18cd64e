"""Manifests of the overlays, as kustomize builds them, and what KubeRay would make of them: pods and their commands.

KubeRay's part is `ray-operator/controllers/ray/common/pod.go` of 1.7, as far as the manifests use it.
"""

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
CLUSTERS = [f"overlays/{name}" for name in OVERLAYS]
BUILDS = [*CLUSTERS, "fetch-model"]
AGENT_PORT = 52365
METRICS_PORT = 8080

Manifest = dict[str, Any]

_UNITS = {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int) -> float:
    """`500m`, `4Gi` or `2` as a number."""
    number = str(text).rstrip("mKMGTi")
    return float(number) * _UNITS[str(text)[len(number) :]]


@functools.cache
def _built(build: str) -> str:
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            made = subprocess.run([*command, str(K8S / build)], capture_output=True, text=True)
            assert made.returncode == 0, made.stderr
            return made.stdout
    pytest.skip("needs kustomize or kubectl, which has it built in: apt-get install kubernetes-client")


@functools.cache
def manifests(build: str) -> list[Manifest]:
    """What `kubectl apply -k` would send. To be copied before it is changed."""
    return list(yaml.load_all(_built(build), yaml.CSafeLoader))


def of_kind(build: str, kind: str) -> list[Manifest]:
    return [one for one in manifests(build) if one["kind"] == kind]


def ray_service(build: str) -> Manifest:
    (found,) = of_kind(build, "RayService")
    return found


def serve_config(build: str) -> Manifest:
    return dict(yaml.safe_load(ray_service(build)["spec"]["serveConfigV2"]))


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One of a group's pods, as KubeRay asks Kubernetes for it."""

    group: str
    number: int
    labels: Mapping[str, str]
    spec: Manifest
    environment: Mapping[str, str]
    """Without what is taken from the pod or from Secrets."""
    start: str
    """The command of the Ray container, for bash."""
    resources: Mapping[str, float]
    """What Ray counts on this node."""
    ray_labels: Mapping[str, str]

    @property
    def container(self) -> Manifest:
        return dict(self.spec["containers"][0])

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def matches(self, selector: Mapping[str, Any]) -> bool:
        """Of a service, or of what has `matchLabels`."""
        wanted = selector.get("matchLabels", selector)
        return all(self.labels.get(name) == value for name, value in wanted.items())


def config_maps(build: str) -> dict[str, Mapping[str, str]]:
    return {one["metadata"]["name"]: one["data"] for one in of_kind(build, "ConfigMap")}


@functools.cache
def pods(build: str, head_address: str = "holdfast-head-svc:6379") -> list[Pod]:
    """The head first. Workers find it at `head_address`."""
    service = ray_service(build)
    cluster = service["spec"]["rayClusterConfig"]
    maps = config_maps(build)
    made = [_pod(cluster["headGroupSpec"] | {"groupName": "headgroup"}, 0, cluster, maps, None)]
    for group in cluster["workerGroupSpecs"]:
        count = group["replicas"] * group.get("numOfHosts", 1)
        made += [_pod(group, number, cluster, maps, head_address) for number in range(count)]
    return made


def _pod(
    group: Manifest, number: int, cluster: Manifest, maps: Mapping[str, Mapping[str, str]], head: str | None
) -> Pod:
    spec = json.loads(json.dumps(group["template"]["spec"]))
    container = spec["containers"][0]
    labels = group["template"].get("metadata", {}).get("labels", {}) | group.get("labels", {})
    labels |= {"ray.io/node-type": "head" if head is None else "worker", "ray.io/group": group["groupName"]}
    start = _start_params(group, container, head)
    _add_probes(container, is_head=head is None)
    if "metrics" not in {port["name"] for port in container["ports"]}:
        container["ports"].append({"name": "metrics", "containerPort": METRICS_PORT})
    head_port = group["rayStartParams"].get("port", "6379")
    environment = {"RAY_ADDRESS": head or f"127.0.0.1:{head_port}", "RAY_AUTH_MODE": cluster["authOptions"]["mode"]}
    environment |= {"RAY_timeout_ms_task_wait_for_death_info": "0", "RAY_SERVE_KV_TIMEOUT_S": "5"}
    environment |= {"RAY_gcs_server_request_timeout_seconds": "5"}
    if "gcsFaultToleranceOptions" in cluster and head is not None:
        environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
    for source in container.get("envFrom", []):
        environment |= maps[source["configMapRef"]["name"]]
    environment |= {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    flags = " ".join(_flag(name, value) for name, value in sorted(start.items()))
    command = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; ray start {'--head ' if head is None else ''}{flags}"
    counted = {"CPU": float(start.get("num-cpus", 0)), "GPU": float(start.get("num-gpus", 0))}
    return Pod(
        group=group["groupName"],
        number=number,
        labels=labels,
        spec=spec,
        environment=environment,
        start=command,
        resources=counted | json.loads(start.get("resources", "{}").strip("'\"")),
        ray_labels=group.get("labels", {}),
    )


def _start_params(group: Manifest, container: Manifest, head: str | None) -> dict[str, str]:
    params = dict(group["rayStartParams"])
    if head is None:
        params.setdefault("dashboard-host", "0.0.0.0")
    else:
        params.setdefault("address", head)
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    params["block"] = "true"
    limits = container["resources"]["limits"]
    params.setdefault("num-cpus", str(-int(-quantity(limits["cpu"]) // 1)))
    params.setdefault("memory", str(int(quantity(limits["memory"]))))
    gpus = next((limits[name] for name in limits if name.endswith("/gpu")), None)
    if gpus is not None:
        params.setdefault("num-gpus", str(gpus))
    if group.get("labels"):
        params["labels"] = ",".join(f"{name}={value}" for name, value in sorted(group["labels"].items()))
    return params


def _flag(name: str, value: str) -> str:
    return f"--{name}" if value == "true" else f"--{name}={value}"


def _add_probes(container: Manifest, *, is_head: bool) -> None:
    """Where none are set. The readiness of a worker then asks Serve's proxy, which is off: `test_settings.py`."""
    health = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}}
    container.setdefault("livenessProbe", health | {"failureThreshold": 120})
    if is_head:
        container.setdefault("readinessProbe", health | {"failureThreshold": 10})
