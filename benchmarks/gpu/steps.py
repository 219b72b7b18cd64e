"""Steps of the GPU executor on a model of random weights: against this device's own bandwidth and matrix rate.

    python -m benchmarks.gpu.steps [--model 8b] [--seconds 5] [--kv-cache-dtype fp8]

Takes some minutes, most of it compiling, and no network. Tells milliseconds a step, and what share of the device's own
rates that is: bandwidth is that of a copy, the matrix rate that of a large product, both measured in the same run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.findings import Findings, Row, machine, parser_of, tell
from benchmarks.gpu.models import MAX_POSITIONS, MODELS
from holdfast.worker.draws import DrawParams
from holdfast.worker.executors.gpu.executor import GpuExecutor
from holdfast.worker.executors.layout import DecoderLayout, Experts, Layer, Mlp, attention_of
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.roofline import Device, ModelShape, step_of
from holdfast.worker.sampling_params import SamplingParams
from scripts.gpu_shapes import Shape, decode_batch, layout_of, prompt_batch

_PLAIN = DrawParams(SamplingParams(seed=1, temperature=0.8), 0)


def _changed(**sampling: object) -> DrawParams:
    return replace(_PLAIN, sampling=_PLAIN.sampling.with_changes(**sampling))


DRAWS: Final = {"drawn": _PLAIN, "top-k": _changed(top_k=50), "top-p": _changed(top_p=0.95)}
"""Random weights give flat logits: the nucleus is nearly all of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    prompts: tuple[int, ...] = (256, 2048)
    copied_bytes: int = 1 << 30
    product: int = 8192
    """Rows and columns of the matrices."""
    draws: tuple[str, ...] = tuple(DRAWS)


TINY: Final = Sizes(batches=(2,), context=16, prompts=(8,), copied_bytes=1 << 16, product=64, draws=("drawn",))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of keys and values")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    sizes = TINY if options.model == "tiny" else Sizes()
    in_fp8 = options.kv_cache_dtype == "fp8"
    tell(measure(options.model, device, sizes, options.seconds, kv_in_fp8=in_fp8), options.json)


def measure(model: str, device: torch.device, sizes: Sizes, seconds: float, *, kv_in_fp8: bool = False) -> Findings:
    """Each step's milliseconds, beside what the device's own rates allow."""
    rates = measured_device(device, sizes, seconds)
    shape, num_layers = shape_of(model)
    executor = GpuExecutor(
        random_layout(shape, num_layers, device), SingleRank(), max_positions=MAX_POSITIONS, device=device
    )
    if kv_in_fp8:
        executor.keep_kv_in_code()
    blocks_each = -(-max(sizes.context, *sizes.prompts) // 64)
    executor.allocate_cache(max(sizes.batches) * blocks_each, 64)
    roofline = roofline_of(shape, num_layers, kv_in_fp8)
    rows: list[Row] = []
    for count in sizes.batches:
        batch = decode_batch(count, sizes.context, own_blocks=True)
        took = milliseconds(partial(executor.run, batch, with_logits=False), seconds, device)
        least = step_of(roofline, rates, num_sequences=count, num_tokens=1, context=sizes.context).kernel_s * 1e3
        rows.append(_row(f"decode {count} at {sizes.context}", took, least, count))
    for count in sizes.prompts:
        batch = prompt_batch(count)
        took = milliseconds(partial(executor.run, batch, with_logits=False), seconds, device)
        least = step_of(roofline, rates, num_sequences=1, num_tokens=count, context=count).kernel_s * 1e3
        rows.append(_row(f"prompt of {count}", took, least, count))
    for count in sizes.batches:
        batch = decode_batch(count, sizes.context, own_blocks=True)
        for name in sizes.draws:
            batch.draws = partial(_drawn, DRAWS[name], count)
            took = milliseconds(partial(executor.run, batch, with_logits=True), seconds, device)
            rows.append({"draws": f"decode {count}, {name}", "ms": took})
    speeds = f"Copies at {rates.bytes_per_s / 1e12:.3g} TB/s, products at {rates.flops_per_s / 1e12:.3g} TFLOP/s."
    title = f"Steps of {model}{', keys and values in fp8' * kv_in_fp8}"
    return Findings(title=title, machine=machine(device), rows=tuple(rows), notes=(speeds,))


def _row(step: str, took: float, least: float, num_tokens: int) -> Row:
    return {
        "step": step,
        "ms": took,
        "its roofline, ms": least,
        "share": least / took,
        "tokens/s": num_tokens / took * 1e3,
    }


def _drawn(draw: DrawParams, count: int) -> list[DrawParams]:
    return [draw.at(row) for row in range(count)]


def shape_of(model: str) -> tuple[Shape, int]:
    """A model's shape, and its layers. Queries have no norm of their own: what that takes is not seen."""
    _, values = MODELS[model]
    num_heads = values["num_attention_heads"]
    shape = Shape(
        values["hidden_size"],
        values.get("moe_intermediate_size") or values["intermediate_size"],
        num_heads,
        values["num_key_value_heads"],
        values.get("head_dim", values["hidden_size"] // num_heads),
        values["vocab_size"],
        num_experts=values.get("num_experts", 0),
        top_k=values.get("num_experts_per_tok", 0),
    )
    return shape, values["num_hidden_layers"]


def roofline_of(shape: Shape, num_layers: int, kv_in_fp8: bool) -> ModelShape:
    return ModelShape(
        num_layers=num_layers,
        hidden=shape.hidden,
        inner=shape.inner,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        num_experts=shape.num_experts,
        experts_per_token=shape.top_k,
        shared_inner=shape.shared_inner,
        kv_in_fp8=kv_in_fp8,
    )


def measured_device(device: torch.device, sizes: Sizes, seconds: float) -> Device:
    """Rates that this device reaches with torch's own kernels."""
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy_ms = milliseconds(lambda: copy.copy_(source), seconds, device)
    left, right = (torch.randn(sizes.product, sizes.product, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right, seconds, device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return Device(
        bytes_per_s=2 * source.numel() / copy_ms * 1e3,
        flops_per_s=2 * sizes.product**3 / product_ms * 1e3,
        memory_bytes=memory,
        link_bytes_per_s=1.0,
    )


def milliseconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The median of single calls, of which the first three do not count; at least one."""
    for _ in range(3):
        work()
    once = _on_device if device.type == "cuda" else _on_host
    times = [once(work)]
    while sum(times) < seconds * 1e3 and len(times) < 1000:
        times.append(once(work))
    return statistics.median(times)


def _on_device(work: Callable[[], object]) -> float:
    make_event: Any = torch.cuda.Event  # torch does not say its type
    start, end = make_event(enable_timing=True), make_event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _on_host(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1e3


def random_layout(shape: Shape, num_layers: int, device: torch.device) -> DecoderLayout:
    """Weights of its own for each layer, so that no cache holds them."""
    layout = layout_of(shape)

    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, device=device) * 0.02

    def linear(like: Linear) -> Linear:
        return Linear(weights=tuple(map(random, like.weights)))

    def norm(like: Norm | None) -> Norm:
        assert like is not None
        return replace(like, weight=torch.ones(like.weight.shape, device=device))

    def dense(like: Mlp) -> Mlp:
        return replace(like, up=linear(like.up), down=linear(like.down))

    def mixture(like: Experts) -> Experts:
        assert like.shared is None, "none of the shapes has one"
        return replace(like, router=linear(like.router), experts=tuple(map(dense, like.experts)))

    def layer(like: Layer) -> Layer:
        attention, mlp = attention_of(like), like.mlp
        assert mlp is not None, "each of the shapes has one"
        return replace(
            like,
            attention_norm=norm(like.attention_norm),
            mlp_norm=norm(like.mlp_norm),
            attention=replace(attention, qkv=linear(attention.qkv), output=linear(attention.output)),
            mlp=dense(mlp) if isinstance(mlp, Mlp) else mixture(mlp),
        )

    embedding = random(layout.embedding)
    return replace(
        layout,
        embedding=embedding,
        head=Linear(weights=(embedding,)),
        norm=norm(layout.norm),
        layers=tuple(layer(layout.layers[0]) for _ in range(num_layers)),
    )


if __name__ == "__main__":
    main()
