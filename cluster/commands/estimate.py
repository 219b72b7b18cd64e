"""Command `holdfast estimate`: how much memory a model needs and what fits, from its config alone.

What may not live here: the estimate (`worker/model/memory.py`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from holdfast.cluster.config.config import load_config
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.sources import Layer, Setting
from holdfast.worker.available_memory import readable_bytes
from holdfast.worker.config import WorkerConfig

if TYPE_CHECKING:
    from holdfast.worker.model.memory import MemoryEstimator


@takes_settings("model", "parallel", "cache", without=("model.model",))
def estimate(
    model: Annotated[
        str | None, Parameter(help="a Hugging Face folder, a hub id, or the bundled demo [default]")
    ] = None,
    /,
    *,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Say how much memory a model needs, without loading it.

    Figures are of one rank. Unless a setting of the cache says otherwise, it is what this machine would give it.
    """
    from holdfast.cluster.bundled_model.bundled_model import located

    if model is not None:
        settings = {**settings, "model.model": Setting(model, "MODEL")}
    _print_estimate(located(load_config(settings, config).config.worker))
    return 0


def _print_estimate(config: WorkerConfig) -> None:
    from holdfast.worker.model.memory import MemoryEstimator

    needs = MemoryEstimator(config)
    cache_bytes = _cache_bytes_here(config, needs)
    num_sequences = needs.num_sequences(cache_bytes, needs.max_model_len)
    print(f"weights     {readable_bytes(needs.weight_bytes)}")
    print(f"KV cache    {readable_bytes(needs.kv_bytes_per_token)} a token, {needs.block_size} tokens a block")
    print(f"in {readable_bytes(cache_bytes)}  {needs.num_blocks(cache_bytes)} blocks")
    print(f"            {num_sequences} sequences of {needs.max_model_len} tokens, the longest this model takes")


def _cache_bytes_here(config: WorkerConfig, needs: "MemoryEstimator") -> int:
    """What a rank on this machine would give its cache; on a GPU, about."""
    import torch

    from holdfast.worker.model.memory import cpu_cache_bytes

    if config.model.device == "cpu" or not torch.cuda.is_available():
        return needs.default_cache_bytes(config, cpu_cache_bytes(), is_gpu=False)
    _, total = torch.cuda.mem_get_info()
    default_bytes = max(0, int(total * config.cache.gpu_memory_utilization) - needs.weight_bytes)
    return needs.default_cache_bytes(config, default_bytes, is_gpu=True)
