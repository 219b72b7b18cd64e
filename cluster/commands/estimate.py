"""Command `holdfast estimate`: how much memory a model needs and what fits, by its config alone; resources of a pod."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from holdfast.cluster.config.flags import ESSENTIALS, flag_table, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.process_memory import readable_bytes

if TYPE_CHECKING:
    from holdfast.worker.config import WorkerConfig
    from holdfast.worker.models.memory import MemoryEstimator


_NOT_WHICH = tuple(
    flag.path for flag in flag_table().settings if flag.section == "cluster" and flag.name != "cpus_per_rank"
)


@takes_settings("model", "parallel", "cache", "cluster", without=("model.model", "model.device", *_NOT_WHICH))
def estimate(
    model: Annotated[
        str | None,
        Parameter(help="a Hugging Face folder, a GGUF file, a hub id, smollm2, or the bundled demo [default]"),
    ] = None,
    /,
    *,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "a100", "h100", "h200", "b200"],
        Parameter(help="device; with a GPU's name: expected step times, from its published figures"),
    ] = "auto",
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    k8s: Annotated[bool, Parameter(name="--k8s", negative=(), help="print resources for a RayService's pods")] = False,
    ranks_per_host: Annotated[int, Parameter(validator=Number(gte=1), help="with --k8s: GPUs per host")] = 8,
    settings: Layer,
) -> int:
    """Say how much memory a model needs, without loading it.

    Figures are of one rank. Without a setting for the cache, its size is this machine's default.
    """
    from holdfast.cluster.bundled_model.bundled_model import located
    from holdfast.cluster.config.config import load_config

    if model is not None:
        settings = {**settings, "model.model": Setting(model, "MODEL")}
    if device in ("cpu", "cuda"):
        settings = {**settings, "model.device": Setting(device, "--device")}
    loaded = load_config(settings, config).config
    worker = located(loaded.worker)
    if k8s:
        _print_resources(worker, loaded.cluster.cpus_per_rank, ranks_per_host)
    elif device in ("auto", "cpu", "cuda"):
        _print_estimate(worker)
    else:
        from holdfast.cluster.commands.roofline import print_roofline

        print_roofline(worker, device)
    return 0


def _print_resources(config: "WorkerConfig", cpus_per_rank: float, ranks_per_host: int) -> None:
    """Prints resources. Device `auto` means GPUs: a machine that asks for this needs none itself."""
    import yaml

    from holdfast.worker.models.memory import CPU_CACHE_LIMIT, MemoryEstimator

    has_gpu = config.model.device != "cpu"
    elsewhere: dict[str, object] = {"model": config.model.model_copy(update={"device": "cpu"})}
    if has_gpu:  # whose cache lies in its own memory
        elsewhere["cache"] = config.cache.model_copy(update={"kv_cache_dtype": "auto"})
    needs = MemoryEstimator(config.model_copy(update=elsewhere))
    cache_bytes = needs.default_cache_bytes(config, CPU_CACHE_LIMIT, is_gpu=False)
    rank = RankNeeds(weight_bytes=needs.weight_bytes, cache_bytes=cache_bytes, cpus=cpus_per_rank, has_gpu=has_gpu)
    try:
        pod = PodResources.of(rank, config.parallel.tensor_parallel_size, ranks_per_host)
    except ValueError as error:
        raise ConfigurationError(f"--ranks-per-host = {ranks_per_host}: {error}") from None
    kept = "" if has_gpu else f" and {readable_bytes(cache_bytes)} of KV cache"
    place = " in the memory of its GPU" if has_gpu else ""
    quantization = "" if needs.quantization == "none" else f", {needs.quantization},"
    print(f"# {readable_bytes(needs.weight_bytes)} of weights{quantization}{kept} a rank{place}")
    print("# workerGroupSpecs, the group of replicas:")
    print(yaml.safe_dump([pod.group()], sort_keys=False), end="")
    print("# serveConfigV2, args:")
    print(yaml.safe_dump(serve_args(pod, rank), sort_keys=False), end="")
    if pod.num_hosts > 1:
        print("# a replica over several hosts: every layer waits for the network twice")


def _print_estimate(config: "WorkerConfig") -> None:
    from holdfast.worker.models.memory import MemoryEstimator

    needs = MemoryEstimator(config)
    cache_bytes = _cache_bytes_here(config, needs)
    room = needs.state_room(config, cache_bytes)
    num_blocks = needs.num_blocks(cache_bytes, room)
    num_sequences = needs.num_sequences(cache_bytes, needs.max_model_len, room)
    print(f"weights     {readable_bytes(needs.weight_bytes)}, quantization {needs.quantization}")
    if needs.shares is not None:
        shares = " : ".join(map(str, needs.shares))
        print(f"            of the rank with most: ranks have {shares} of its heads and inner features")
    print(f"KV cache    {readable_bytes(needs.kv_bytes_per_token)} a token, {needs.block_size} tokens a block")
    if needs.window is not None:
        most = needs.window.most_blocks(needs.max_model_len) * needs.block_bytes
        print(f"            and {readable_bytes(most)} a sequence for layers that see {needs.window.num_tokens} tokens")
    if needs.state_bytes:
        print(f"states      {readable_bytes(needs.state_bytes)} a sequence, and as much for each kept prefix")
    slots = f" and {room.own_slots} slots for states" if room.own_slots else ""
    if room.state_blocks:
        slots = f", or a state in the place of each {room.state_blocks}"
    print(f"in {readable_bytes(cache_bytes)}  {num_blocks} blocks{slots}")
    print(f"            {num_sequences} sequences of {needs.max_model_len} tokens, the longest this model takes")
    if config.cache.kv_transfer and needs.window is None:
        sent = needs.kv_bytes_per_token * config.parallel.tensor_parallel_size
        speeds = " | ".join(f"{gbit * GBIT_BYTES // sent:,}" for gbit in LINKS_GBIT)
        links = " | ".join(map(str, LINKS_GBIT))
        print(f"transfers   over {links} Gbit/s a prompt's blocks come from another replica sooner than they are")
        print(f"            computed where that takes fewer than {speeds} tokens a second")


def _cache_bytes_here(config: "WorkerConfig", needs: "MemoryEstimator") -> int:
    """Bytes that a rank on this machine would give its cache; approximate on a GPU."""
    import torch

    from holdfast.worker.models.memory import cpu_cache_bytes

    if config.model.device == "cpu" or not torch.cuda.is_available():
        return needs.default_cache_bytes(config, cpu_cache_bytes(), is_gpu=False)
    _, total = torch.cuda.mem_get_info()
    default_bytes = max(0, int(total * config.cache.gpu_memory_utilization) - needs.weight_bytes)
    return needs.default_cache_bytes(config, default_bytes, is_gpu=True)


GBIT_BYTES: Final = 125_000_000
"""Bytes a second."""
LINKS_GBIT: Final = (1, 10, 100)
"""Links between hosts that an estimate of transfers is made for."""


# --- resources of a pod ---


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
