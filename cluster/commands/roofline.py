"""Roofline of a model as a table: expected times of its steps on a GPU, by the GPU's published figures."""

from pathlib import Path
from typing import Any

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.roofline import DEVICES, ModelShape, Step, kv_bytes_per_token, step_of, weight_bytes
from holdfast.worker.process_memory import readable_bytes

_DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024))  # sequences, tokens of context of each
_PROMPT = 2048  # tokens
_NUMBER_BITS = 16.0


def print_roofline(config: WorkerConfig, device_name: str) -> None:
    """Raises `ConfigurationError` where the model has no roofline, or does not fit."""
    from holdfast.worker.models.checks import check_kv_cache_dtype
    from holdfast.worker.models.weights import model_folder, read_config

    device, tp = DEVICES[device_name], config.parallel.tensor_parallel_size
    folder = model_folder(config.model, with_weights=False)
    hf_config = read_config(folder, config.model.config_changes)
    check_kv_cache_dtype(config, "cuda", hf_config)
    try:
        shape = _shape(config, folder, hf_config)
        decodes = [
            step_of(shape, device, num_sequences=count, num_tokens=1, context=context, tp=tp)
            for count, context in _DECODES
        ]
        prompt = step_of(shape, device, num_sequences=1, num_tokens=_PROMPT, context=_PROMPT, tp=tp)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    weights = weight_bytes(shape, tp)
    linears = "bfloat16" if shape.weight_bits == _NUMBER_BITS else f"{shape.weight_bits:.4g} bits a weight of a linear"
    print(f"{device_name}, tensor parallel {tp}, {linears}: {weights / 1e9:.3g} GB of weights a rank")
    if weights > device.memory_bytes:
        print(f"does not fit: a device has {device.memory_bytes / 1e9:.3g} GB")
    else:
        _print_cache(config, shape, int(device.memory_bytes * config.cache.gpu_memory_utilization) - weights)
    print("No step takes less; launches, host and sums over ranks are assumed, not measured.")
    if shape.num_experts:
        read = ", ".join(f"{shape.experts_read(count):.3g} for {count}" for count, _ in _DECODES)
        print(f"Experts of a layer that are read, if tokens choose any alike, of {shape.num_experts}: {read} tokens.")
    print()
    print("step                           kernels  sums  launches and host  in all   tokens/s  share of kernels")
    for (count, context), step in zip(_DECODES, decodes, strict=True):
        print(_line(f"decode {count} of {context}", step, count))
    print(_line(f"prompt of {_PROMPT}", prompt, _PROMPT))
    if tp > 1:
        _print_sums(decodes[2], prompt, tp)
    print("\nkernel              decode 64 of 1024: GB, GFLOP, ms   prompt: GB, GFLOP, ms")
    for one, other in zip(decodes[2].kernels, prompt.kernels, strict=True):
        figures = (one.num_bytes / 1e9, one.flops / 1e9, one.seconds(device) * 1e3)
        more = (other.num_bytes / 1e9, other.flops / 1e9, other.seconds(device) * 1e3)
        cells = "".join(f"{figure:10.3g}" for figure in (*figures, *more))
        print(f"{one.name:19}{cells}")


def _shape(config: WorkerConfig, folder: Path, hf_config: Any) -> ModelShape:
    """Shape of the model, with the bits of weights that stay codes on a GPU. Raises ValueError as `ModelShape.of`."""
    from holdfast.worker.models.coded_bytes import coded_bytes

    coded = coded_bytes(config.model, folder, "cuda", hf_config.model_type)
    of_linears = coded and coded.bits("model.layers.0.mlp.down_proj.weight")
    return ModelShape.of(
        hf_config,
        kv_in_fp8=config.cache.kv_cache_dtype == "fp8",
        weight_bits=of_linears or _NUMBER_BITS,
        head_bits=(coded and coded.bits("lm_head.weight")) or _NUMBER_BITS,
    )


def _print_sums(decode: Step, prompt: Step, tp: int) -> None:
    """Prints the cost of sums that do not depend on the number of ranks."""
    print(f"\nsums that are the same for any number of ranks; a plain bfloat16 all-reduce of {tp} ranks")
    print("step                     slices, GB  received, GB     ms   plain: received, GB     ms")
    for name, step in ((f"decode {_DECODES[2][0]} of {_DECODES[2][1]}", decode), (f"prompt of {_PROMPT}", prompt)):
        sums, device = step.sums, step.device
        ours = f"{sums.slice_bytes / 1e9:10.3g} {sums.link_bytes / 1e9:13.3g} {sums.seconds(device) * 1e3:6.2f}"
        print(f"{name:24} {ours} {sums.plain_link_bytes / 1e9:21.3g} {sums.plain_seconds(device) * 1e3:6.2f}")


def _print_cache(config: WorkerConfig, shape: ModelShape, room: int) -> None:
    """`room`: bytes of a rank beside its weights, of which steps take some."""
    of_token, kept = kv_bytes_per_token(shape, config.parallel.tensor_parallel_size), config.cache.kv_cache_dtype
    dtype = "bfloat16" if kept == "auto" else kept
    print(f"KV cache in {dtype}: {readable_bytes(of_token)} a token, less than {max(room, 0) // of_token} tokens")


def _line(name: str, step: Step, num_tokens: int) -> str:
    rest = step.seconds - step.kernel_s - step.exchange_s
    times = f"{step.kernel_s * 1e3:7.2f} {step.exchange_s * 1e3:5.2f} {rest * 1e3:17.2f} {step.seconds * 1e3:8.2f} ms"
    return f"{name:28} {times} {num_tokens / step.seconds:9.0f} {step.share_of_kernels:9.0%}"
