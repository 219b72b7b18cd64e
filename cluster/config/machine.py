"""Hardware of this machine, and whether the settings fit it. It needs neither torch nor Ray."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.model_files import weight_bytes
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.checks import check_kv_cache_dtype
from holdfast.worker.process_memory import available_memory, readable_bytes

RANK_BYTES: Final = 200 * 2**20
"""Memory of a rank's process without weights and cache: a little less than torch takes."""

MAX_RANKS_PER_CORE: Final = 4
"""Most ranks per CPU core: with more, a start takes minutes. Two replicas of two ranks on two cores, the demo, are
fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of this machine."""

    num_cores: int
    available_bytes: int
    num_gpus: int
    """NVIDIA GPUs, as the driver shows them."""

    @classmethod
    def here(cls) -> Self:
        """This machine: cores that this process may use, available memory in bytes, and NVIDIA devices."""
        devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return cls(num_cores=len(os.sched_getaffinity(0)), available_bytes=available_memory(), num_gpus=len(devices))


def check_fits(models: Sequence[HoldfastConfig], machine: Machine) -> None:
    """Refuses what cannot fit, by estimates that are too low rather than too high. Raises `ConfigurationError`."""
    for one in models:
        if one.model.device == "cuda" and not machine.num_gpus:
            raise ConfigurationError(
                "model.device = 'cuda': this machine shows no NVIDIA GPU (/dev/nvidia0 is not there; does `nvidia-smi` "
                "find one?); leave --device at auto, or set it to cpu"
            )
        is_on_gpu = machine.num_gpus and one.model.device != "cpu"
        check_kv_cache_dtype(one.worker, "cuda" if is_on_gpu else "cpu")
    if machine.num_gpus and any(one.model.device != "cpu" for one in models):
        _check_gpus(models, machine)
    else:
        _check_memory(models, machine)


def crowding(models: Sequence[HoldfastConfig], machine: Machine) -> str | None:
    """A warning about too many ranks for the cores: they start one after the other, and each step is slow. None: there
    is no problem.
    """
    on_cores = [one for one in models if one.model.device == "cpu" or not machine.num_gpus]
    num_ranks = sum(map(_num_ranks, on_cores))
    if num_ranks <= MAX_RANKS_PER_CORE * machine.num_cores:
        return None
    return (
        f"{_shape(on_cores)}: {num_ranks} ranks share {machine.num_cores} cores, so they start slowly, and a token "
        f"takes about {num_ranks / machine.num_cores:.0f} times as long; lower --replicas or --tp"
    )


def _check_gpus(models: Sequence[HoldfastConfig], machine: Machine) -> None:
    needed = sum(map(_num_ranks, models))
    if needed > machine.num_gpus:
        raise ConfigurationError(
            f"{_shape(models)}: needs {needed} GPUs, one for each rank, and this machine has {machine.num_gpus}; lower "
            "--replicas or --tp, set --device cpu, or join a Ray cluster by --address"
        )


def _check_memory(models: Sequence[HoldfastConfig], machine: Machine) -> None:
    there = readable_bytes(machine.available_bytes)
    for one in models:
        cache = one.cache.kv_cache_memory or 0
        if cache > machine.available_bytes:
            raise ConfigurationError(
                f"cache.kv_cache_memory = {readable_bytes(cache)}: this machine has {there} of memory left; lower "
                "--kv-cache-memory, or leave it unset"
            )
        if weight_bytes(one) > machine.available_bytes:
            raise ConfigurationError(
                f"model.model = {one.model.model!r}: its weights are {readable_bytes(weight_bytes(one))}, and this "
                f"machine has {there} of memory left; serve a smaller model (`holdfast estimate` says what one needs)"
            )
    needed = sum(_needed_bytes(one) for one in models)
    if needed > machine.available_bytes:
        raise ConfigurationError(
            f"{_shape(models)}: needs about {readable_bytes(needed)} of memory, and this machine has {there} left; "
            "lower --replicas, --tp or --kv-cache-memory"
        )


def _needed_bytes(config: HoldfastConfig) -> int:
    of_ranks = _num_ranks(config) * (RANK_BYTES + (config.cache.kv_cache_memory or 0))
    return of_ranks + config.cluster.replicas * weight_bytes(config)


def _num_ranks(config: HoldfastConfig) -> int:
    return config.cluster.replicas * config.parallel.tensor_parallel_size


def _shape(models: Sequence[HoldfastConfig]) -> str:
    shapes = [
        f"cluster.replicas = {one.cluster.replicas} x parallel.tensor_parallel_size = "
        f"{one.parallel.tensor_parallel_size}"
        for one in models
    ]
    return " and ".join(shapes)
