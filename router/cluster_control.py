"""Cluster control: changes of models and access to logs that a router offers operators.

A router in a cluster has an implementation; a router that runs alone has None.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """One model of a cluster, as the cluster's directory and Ray Serve know it."""

    name: str
    status: str
    """Ray Serve's status of the application: RUNNING, DEPLOYING, UNHEALTHY, DEPLOY_FAILED or DELETING."""
    num_replicas: int
    """Replicas that serve."""
    engines: tuple[str, ...] = ()
    """`host:port` of each replica that serves vLLM's engine protocol."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Replicas that serve, by version: more than one version during an update."""
    num_on_full_disks: int = 0
    """Replicas on nodes without room under Ray's session folder, where no replica that ends can be replaced."""
    activity: str = ""
    """Activity of the replicas that do not serve yet, or the reason why they cannot."""
    settings: str = ""
    """The settings that its replicas were started with, as nested JSON; empty while none serves. No secrets."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of its adapters, by name."""
    pinned_adapters: tuple[str, ...] = ()
    """Names of those that stay resident in each replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddModel:
    """`settings` are nested sections, as in a configuration file."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateModel:
    """`settings` are the changed ones. A canary gets `canary_share` (0..1) of new requests for `canary_s` seconds."""

    model: str
    settings: Mapping[str, Any]
    canary_share: float = 0.0
    canary_s: float = 60.0
    min_requests: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackModel:
    """Undo an interrupted update. `drain_timeout_s` None: as the cluster was started."""

    model: str
    drain_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveModel:
    """Remove a model. `drain_timeout_s` None: as the cluster was started."""

    model: str
    drain_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleModel:
    """Give a model this number of replicas."""

    model: str
    num_replicas: int


ModelChange = AddModel | UpdateModel | RollbackModel | RemoveModel | ScaleModel


@dataclass(frozen=True, slots=True)
class Progress:
    """A phase of a change, which ends when `done` reaches `total`."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChanged:
    """The result of a change."""

    model: str
    num_replicas: int = 0
    """Replicas that serve; 0 after a removal."""
    old_version: str = ""
    new_version: str = ""
    removed_applications: tuple[str, ...] = ()
    """Ray Serve applications that a rollback removed."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of the cluster has written. `process` is its role, model and process id."""

    process: str
    text: str


class ClusterControl(Protocol):
    """Called on the router's event loop. Errors are raised as `HoldfastError`."""

    async def list_models(self) -> Sequence[ClusterModel]:
        """Every model of the cluster, including models that start or end."""

    def change(self, change: ModelChange) -> AsyncGenerator[Progress | ModelChanged, None]:
        """Progress, then one result. Closing the generator undoes a change that is not complete."""

    def read_logs(self, process: str, num_lines: int, *, follows: bool) -> AsyncGenerator[Sequence[LogLine], None]:
        """Lines of the processes on this machine whose name contains `process`: the last `num_lines`, in batches by
        time; with `follows`, new lines as they are written until the generator is closed.
        """
