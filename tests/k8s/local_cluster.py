"""A cluster from its own manifests, without Kubernetes: each pod is a host with the processes that KubeRay would start.

As KubeRay does it: `ray start` of head and workers, then the Serve config through the dashboard's REST API. As kubelet
does it: probes, and the hook before a pod ends.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.k8s.hosts import Host, Hosts, hosts
from tests.k8s.rendering import Pod, pods, serve_config

TOKEN: Final = "a-token-of-a-secret-that-kuberay-makes"
"""Where a pod reads it: KubeRay sets `RAY_AUTH_TOKEN` from the Secret."""

DASHBOARD: Final = 8265
READY_S: Final = 200.0
PROBE_S: Final = 5.0
POLL_S: Final = 0.3


@dataclass
class Running:
    """One pod that has been started."""

    pod: Pod
    host: Host

    def probe(self, name: str) -> str:
        """Why it fails; empty if it succeeds. As kubelet does, from outside of the pod but for `exec`."""
        probe = self.pod.container[name]
        try:
            if "httpGet" in probe:
                return self._http(probe["httpGet"])
            if "grpc" in probe:
                return self._grpc(probe["grpc"])
            made = self.host.run(probe["exec"]["command"], PROBE_S)
            return made.stdout + made.stderr if made.returncode else ""
        except (OSError, grpc.RpcError) as error:
            return repr(error)

    def end(self) -> str:
        """As when it is deleted: the hook, then SIGTERM and SIGKILL. What the hook said."""
        hook = self.pod.container["lifecycle"]["preStop"]["exec"]["command"]
        made = self.host.run(hook, self.pod.spec["terminationGracePeriodSeconds"])
        self.host.kill()
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout + made.stderr

    def _http(self, asked: dict[str, Any]) -> str:
        port = self.pod.ports.get(asked["port"], asked["port"])
        with urllib.request.urlopen(f"http://{self.host.address}:{port}{asked['path']}", timeout=PROBE_S) as answer:
            return "" if 200 <= answer.status < 400 else str(answer.status)

    def _grpc(self, asked: dict[str, Any]) -> str:
        with grpc.insecure_channel(f"{self.host.address}:{asked['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=asked.get("service", "")), timeout=PROBE_S)
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else str(answer.status)


@dataclass
class LocalCluster:
    """Made by `local_cluster`."""

    machine: Hosts
    build: str
    running: list[Running] = field(default_factory=list)

    @property
    def deployed(self) -> dict[str, Any]:
        """The Serve config of the manifest."""
        return serve_config(self.build)

    @property
    def settings(self) -> dict[str, Any]:
        (application,) = self.deployed["applications"]
        return dict(application["args"])

    @property
    def head(self) -> Running:
        return self.running[0]

    @property
    def head_address(self) -> str:
        return f"{self.head.host.address}:6379"

    def group(self, name: str) -> list[Running]:
        return [one for one in self.running if one.pod.group == name]

    def start(self, pod: Pod) -> Running:
        shm = next(volume["emptyDir"]["sizeLimit"] for volume in pod.spec["volumes"] if volume["name"] == "shm")
        environment = dict(pod.environment) | {"RAY_AUTH_TOKEN": TOKEN}
        name = f"{pod.group}-{len(self.running)}"
        started = Running(pod, self.machine.start(name, pod.start, environment, shm[:-1].lower()))
        self.running.append(started)
        return started

    def replace(self, lost: Running) -> Running:
        """As KubeRay does when a pod of a group is missing."""
        self.running.remove(lost)
        return self.start(lost.pod)

    def deploy(self) -> None:
        """As KubeRay does once the head is up."""
        self.ask("PUT", self.deployed)

    def applications(self) -> dict[str, Any]:
        return dict(self.ask("GET")["applications"])

    def ask(self, method: str, body: object = None) -> Any:
        return ask_serve(self.head.host, method, body)

    def until_running(self, condition: Callable[[], bool]) -> None:
        """Until this is so, Serve has done what it was told, and every pod is ready."""

        def is_done() -> bool:
            is_running = all(one["status"] == "RUNNING" for one in self.applications().values())
            return is_running and condition() and not self.not_ready()

        until(is_done, lambda: f"not ready: {self.not_ready()}; Serve: {self.applications()}")

    def until_ready(self) -> None:
        until(lambda: not self.not_ready(), lambda: f"not ready: {self.not_ready()}; Serve: {self.applications()}")

    def not_ready(self) -> dict[str, str]:
        heard = {one.host.name: one.probe("readinessProbe") for one in self.running}
        return {name: why for name, why in heard.items() if why}


def ask_serve(head: Host, method: str, body: object = None) -> Any:
    """Serve's REST API on the head. Raises `OSError`."""
    request = urllib.request.Request(
        f"http://{head.address}:{DASHBOARD}/api/serve/applications/",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def until(condition: Callable[[], bool], tell: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < deadline_s, tell()
        time.sleep(POLL_S)


@contextmanager
def local_cluster(build: str, logs: Path) -> Iterator[LocalCluster]:
    """All pods of an overlay, ready. Afterwards nothing of it runs."""
    with hosts(logs) as machine:
        cluster = LocalCluster(machine, build)
        head_address = f"{machine.next_address()}:6379"
        head, *workers = pods(build, head_address)
        cluster.start(head)
        until(lambda: not cluster.head.probe("readinessProbe"), lambda: cluster.head.probe("readinessProbe"))
        for pod in workers:
            cluster.start(pod)
        cluster.deploy()
        cluster.until_running(lambda: True)
        yield cluster
