"""Steps of the GPU executor on a model of random weights: against this device's own bandwidth and matrix rate.

    python -m benchmarks.gpu.steps [--model 8b] [--seconds 5] [--kv-cache-dtype fp8_e4m3]

Takes some minutes, most of it compiling, and no network. Prints milliseconds a step, and what share of the device's own
rates that is: bandwidth is that of a copy, the matrix rate that of a large product, both measured in the same run.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.worker.decoder.gpu.executor import GpuExecutor
from holdfast.worker.decoder.layout import DecoderLayout, Experts, Layer, Linear, Mlp, Norm
from holdfast.worker.distributed.tensor_parallel import SingleRank
from holdfast.worker.model.roofline import Device, ModelShape, step_of
from holdfast.worker.plan.step_plan import DrawParams
from scripts.gpu_kernels import Shape, decode_batch, layout_of, prompt_batch

SHAPES = {
    "8b": (Shape(4096, 14336, 32, 8, 128, 128256), 32),
    "0.6b": (Shape(1024, 3072, 16, 8, 128, 151936), 28),
    "30b-a3b": (Shape(2048, 768, 32, 4, 128, 151936, num_experts=128, top_k=8), 24),
}
"""Llama-3.1-8B, Qwen3-0.6B and their layers; Qwen3-30B-A3B and half of its layers, whose weights are there twice while
they are copied. Its random routers choose all experts about alike.
"""

_PLAIN = DrawParams(seed=1, first_output_index=0, temperature=0.8, top_k=0, top_p=1.0)
DRAWS = {"drawn": _PLAIN, "top-k": replace(_PLAIN, top_k=50), "top-p": replace(_PLAIN, top_p=0.95)}
"""Random weights give flat logits: the nucleus is nearly all of the vocabulary."""

BATCHES, CONTEXT, PROMPT = (1, 8, 64, 256), 1024, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="of keys and values")
    options = parser.parse_args()
    device = measured_device(options.seconds)
    print(f"{torch.cuda.get_device_name()}: copies at {device.bytes_per_s / 1e12:.2f} TB/s, ", end="")
    print(f"products at {device.flops_per_s / 1e12:.0f} TFLOP/s, torch {torch.__version__}\n")
    shape, num_layers = SHAPES[options.model]
    executor = GpuExecutor(
        random_layout(shape, num_layers), SingleRank(), max_positions=4096, device=torch.device("cuda", 0)
    )
    in_fp8 = options.kv_cache_dtype == "fp8_e4m3"
    if in_fp8:
        executor.keep_in_fp8()
    executor.allocate_cache(max(BATCHES) * CONTEXT // 64, 64)
    roofline = ModelShape(
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
        kv_in_fp8=in_fp8,
    )
    print("step               ms  its roofline  share")
    for count in BATCHES:
        batch = decode_batch(count, CONTEXT, own_blocks=True)
        took = milliseconds(partial(executor.run, batch, with_logits=False), options.seconds)
        least = step_of(roofline, device, num_sequences=count, num_tokens=1, context=CONTEXT).kernel_s * 1e3
        print(f"decode {count:4}  {took:9.3f}  {least:12.3f}  {least / took:5.0%}")
        for name, draw in DRAWS.items():
            batch.draws = partial(_drawn, draw, count)
            took = milliseconds(partial(executor.run, batch, with_logits=True), options.seconds)
            print(f"  {name:9}  {took:9.3f}")
    batch = prompt_batch(PROMPT)
    took = milliseconds(lambda: executor.run(batch, with_logits=False), options.seconds)
    least = step_of(roofline, device, num_sequences=1, num_tokens=PROMPT, context=PROMPT).kernel_s * 1e3
    print(f"prompt {PROMPT:4}  {took:9.3f}  {least:12.3f}  {least / took:5.0%}")


def _drawn(draw: DrawParams, count: int) -> list[DrawParams]:
    return [draw.at(row) for row in range(count)]


def measured_device(seconds: float) -> Device:
    """Rates that this device reaches with torch's own kernels."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    copy_ms = milliseconds(lambda: copy.copy_(source), seconds)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: left @ right, seconds)
    return Device(
        bytes_per_s=2 * source.numel() / copy_ms * 1e3,
        flops_per_s=2 * 8192**3 / product_ms * 1e3,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        link_bytes_per_s=1.0,
    )


def milliseconds(work: Callable[[], object], seconds: float) -> float:
    """The median of single calls, of which the first three do not count."""
    for _ in range(3):
        work()
    times: list[float] = []
    while sum(times) < seconds * 1e3 and len(times) < 1000:
        make_event: Any = torch.cuda.Event  # torch does not say its type
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def random_layout(shape: Shape, num_layers: int) -> DecoderLayout:
    """Weights of its own for each layer, so that no cache holds them."""
    layout = layout_of(shape)
    embedding = _random(layout.embedding)
    return replace(
        layout,
        embedding=embedding,
        head=Linear(weights=(embedding,)),
        norm=_norm(layout.norm),
        layers=tuple(_layer(layout.layers[0]) for _ in range(num_layers)),
    )


def _layer(layer: Layer) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention_norm=_norm(layer.attention_norm),
        mlp_norm=_norm(layer.mlp_norm),
        attention=replace(attention, qkv=_linear(attention.qkv), output=_linear(attention.output)),
        mlp=_mlp(mlp) if isinstance(mlp, Mlp) else _experts(mlp),
    )


def _mlp(mlp: Mlp) -> Mlp:
    return replace(mlp, up=_linear(mlp.up), down=_linear(mlp.down))


def _experts(experts: Experts) -> Experts:
    assert experts.shared is None, "none of the shapes has one"
    return replace(experts, router=_linear(experts.router), experts=tuple(map(_mlp, experts.experts)))


def _linear(linear: Linear) -> Linear:
    return Linear(weights=tuple(map(_random, linear.weights)))


def _norm(norm: Norm | None) -> Norm:
    assert norm is not None
    return replace(norm, weight=torch.ones(norm.weight.shape, device="cuda"))


def _random(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device="cuda") * 0.02


if __name__ == "__main__":
    main()
