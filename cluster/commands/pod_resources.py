"""Resources of the pods of one replica on Kubernetes, from what a rank needs."""

from dataclasses import dataclass
from typing import Any, Final

GIB: Final = 2**30
MIB: Final = 2**20

RAY_BYTES: Final = 1 * GIB
"""Memory per pod for Ray's own processes, with room for workers that Ray starts and leaves idle. Measured: 370 MB."""

RANK_BYTES: Final = 1 * GIB
"""Memory per rank for Python, PyTorch, a step's buffers and what libraries keep (docs/health.md). Measured: 0.2 to 0.5
GB."""

GPU_RANK_BYTES: Final = 4 * GIB
"""The same beside a GPU: CUDA, NCCL and pinned buffers as well, and a part of the weights at a time."""

MARGIN: Final = 1.15
"""A pod beyond its limit is killed."""

STORE_BYTES: Final = 100 * MIB
"""Ray's object store (`object-store-memory`), which is in shared memory. Nothing of a request is stored there."""

SPARE_CPUS: Final = 1
"""Above what Ray counts: routers' links, hang supervisors, Ray."""


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """Resources of one rank."""

    weight_bytes: int
    cache_bytes: int
    """On a CPU; a GPU's cache is in its own memory."""
    cpus: float
    has_gpu: bool


@dataclass(frozen=True, kw_only=True)
class PodResources:
    """Resources of each pod of one replica."""

    num_hosts: int
    ranks_per_host: int
    cpus: float
    """CPUs that Ray counts and Kubernetes reserves."""
    gpus: int
    memory_bytes: int
    shm_bytes: int
    """A part of the memory."""

    @classmethod
    def of(cls, rank: RankNeeds, num_ranks: int, ranks_per_host: int) -> "PodResources":
        """Raises `ValueError` where ranks cannot be shared out evenly: every pod of a group is alike."""
        num_hosts = -(-num_ranks // ranks_per_host)
        if num_ranks % num_hosts:
            raise ValueError(f"{num_ranks} ranks cannot be shared out evenly among {num_hosts} hosts")
        here = num_ranks // num_hosts
        shm = STORE_BYTES + here * (GIB if rank.has_gpu else 128 * MIB)
        own = GPU_RANK_BYTES if rank.has_gpu else RANK_BYTES + rank.weight_bytes + rank.cache_bytes
        return cls(
            num_hosts=num_hosts,
            ranks_per_host=here,
            cpus=rank.cpus * here,
            gpus=here if rank.has_gpu else 0,
            memory_bytes=int((RAY_BYTES + here * own) * MARGIN) + shm,
            shm_bytes=shm,
        )

    def group(self) -> dict[str, Any]:
        """The fields that differ in the replica group of a RayService, as in the manifests in `k8s/`."""
        cpus, gpus = _plain(self.cpus), {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        memory = f"{-(-self.memory_bytes // GIB)}Gi"
        resources = {
            "requests": {"cpu": cpus, "memory": memory, **gpus},
            "limits": {"cpu": _plain(self.cpus + SPARE_CPUS), "memory": memory, **gpus},
        }
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-self.shm_bytes // MIB)}Mi"}}
        spec = {"containers": [{"name": "replica", "resources": resources}], "volumes": [shm]}
        return {
            "groupName": "replicas",
            "numOfHosts": self.num_hosts,
            "rayStartParams": {"num-cpus": cpus, "object-store-memory": str(STORE_BYTES)},
            "template": {"spec": spec},
        }


def serve_args(pod: PodResources, rank: RankNeeds) -> dict[str, Any]:
    """The settings that go with these pods."""
    ranks = pod.num_hosts * pod.ranks_per_host
    span = {"span_nodes": True} if pod.num_hosts > 1 else {}
    parallel = {"tensor_parallel_size": ranks, "num_threads": max(1, int(rank.cpus))}
    cache = {} if rank.has_gpu else {"cache": {"kv_cache_memory": rank.cache_bytes}}
    return {
        "model": {"device": "cuda" if rank.has_gpu else "cpu"},
        "parallel": parallel,
        **cache,
        "cluster": {"cpus_per_rank": rank.cpus, **span},
    }


def _plain(number: float) -> str:
    """Ray counts whole CPUs of a node."""
    return str(-int(-number // 1))
