"""Shapes of models and steps for the GPU executor, on torch's meta device: layouts, plans and draws without memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.executors.coded import CodedMatrix, CodeForm, CodeKind, Offset
from holdfast.worker.executors.layout import Activation, Attention, DecoderLayout, Experts, Layer, Mlp, Rotary
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

_CONTEXT: Final = 4000


@dataclass(frozen=True)
class Shape:
    """What of a model decides on its kernels."""

    hidden: int
    inner: int
    """Of an expert, where there are some."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    window: int | None = None
    softcap: float | None = None
    num_experts: int = 0
    top_k: int = 0
    shared_inner: int = 0
    """Of the expert that all tokens go through, if there is one."""


SHAPES: Final = {
    "Llama-3.1-8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "Gemma-2-9B": Shape(3584, 14336, 16, 8, 256, 256000, window=4096, softcap=50.0),
    "Qwen2.5-0.5B": Shape(896, 4864, 14, 2, 64, 151936),
    "Qwen3-30B-A3B": Shape(2048, 768, 32, 4, 128, 151936, num_experts=128, top_k=8),
    "Qwen1.5-MoE-A2.7B": Shape(2048, 1408, 16, 16, 128, 151936, num_experts=60, top_k=4, shared_inner=5632),
    "gpt-oss-20b": Shape(2880, 2880, 64, 8, 64, 201088, window=128, num_experts=32, top_k=4),
}


def layout_of(shape: Shape, num_layers: int = 1) -> DecoderLayout:
    """A model of this shape without memory."""

    def weight(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device="meta")

    def norm() -> Norm:
        return Norm(kind="rms", weight=torch.empty(shape.hidden, device="meta"), eps=1e-5)

    width = shape.head_dim * shape.num_heads
    both = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    attention = Attention(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        qkv=Linear(weights=(weight(both, shape.hidden),)),
        rotary=0,
        scaling=shape.head_dim**-0.5,
        sliding_window=shape.window,
        softcap=shape.softcap,
        output=Linear(weights=(weight(shape.hidden, width),)),
        num_slices=8 if shape.num_heads % 8 == 0 else 2,
    )

    def mlp(inner: int) -> Mlp:
        return Mlp(
            activation=Activation.SILU,
            has_gate=True,
            up=Linear(weights=(weight(2 * inner, shape.hidden),)),
            down=Linear(weights=(weight(shape.hidden, inner),)),
            num_slices=attention.num_slices,
        )

    def experts() -> Experts:
        return Experts(
            router=Linear(weights=(weight(shape.num_experts, shape.hidden),)),
            top_k=shape.top_k,
            scoring="softmax",
            normalized=True,
            experts=tuple(mlp(shape.inner) for _ in range(shape.num_experts)),
            shared=mlp(shape.shared_inner) if shape.shared_inner else None,
            shared_gate=Linear(weights=(weight(1, shape.hidden),)) if shape.shared_inner else None,
        )

    own = experts() if shape.num_experts else mlp(shape.inner)
    layer = Layer(attention_norm=norm(), attention=attention, mlp_norm=norm(), mlp=own)
    embedding = weight(shape.vocab_size, shape.hidden)
    return DecoderLayout(
        dtype=torch.bfloat16,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab_size,
        embedding=embedding,
        rotaries=(Rotary(inverse_frequencies=torch.ones(shape.head_dim // 2)),),
        layers=(layer,) * num_layers,
        norm=norm(),
        head=Linear(weights=(embedding,)),
    )


def decode_batch(count: int, context: int = _CONTEXT, *, own_blocks: bool = False) -> StepBatch:
    """A step of `count` sequences with one token each, which all share one block, or have blocks of their own."""
    return _batch([(context - 1, 1)] * count, own_blocks)


def prompt_batch(count: int) -> StepBatch:
    """A step of one prompt."""
    return _batch([(0, count)], True)


def _batch(sequences: list[tuple[int, int]], own_blocks: bool) -> StepBatch:
    """Sequences by first position and number of tokens, of blocks of 64."""
    most = max(-(-(first + count) // 64) for first, count in sequences)
    shares = tuple(
        ScheduledSequence(
            sequence_id=number,
            first_position=first,
            token_ids=(5,) * count,
            block_ids=tuple((number * most + block) * own_blocks for block in range(-(-(first + count) // 64))),
            draw=None,
            num_draws=1,
        )
        for number, (first, count) in enumerate(sequences)
    )
    return StepBatch.of(StepPlan(step_id=0, others=shares))


def drawn_rows() -> list[tuple[list[DrawParams], dict[int, bytes] | None]]:
    """Draws of all kinds: plain, with log-probabilities, with edits, with masks."""
    plain = DrawParams(SamplingParams(seed=1, top_k=50, top_p=0.9, min_p=0.01), 0)
    penalized = replace(plain, logits_settings=LogitsSettings(repetition_penalty=1.5), output_token_ids=(1, 2))
    masked = replace(plain, logits_settings=LogitsSettings(grammar="x"))
    return [
        ([plain, plain], None),
        ([plain, replace(plain, sampling=plain.sampling.with_changes(logprobs=5))], None),
        ([plain, penalized], None),
        ([plain, masked], {1: b"\x07"}),
    ]


CODES: Final[Mapping[str, tuple[CodeForm, int]]] = {
    "int4 g32": (CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.MIDDLE, scales=torch.bfloat16), 32),
    "int4 g128, zero points": (
        CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.ZERO_POINTS, scales=torch.bfloat16),
        128,
    ),
    "int4 in order of activations": (
        CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.ZERO_POINTS, scales=torch.bfloat16),
        0,
    ),
    "Q4_1": (CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.MINIMA, scales=torch.float16), 32),
    "Q4_K": (CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.MINIMA, scales=torch.float32), 32),
    "Q6_K": (CodeForm(kind=CodeKind.EIGHT_BITS, offset=Offset.MIDDLE, scales=torch.float32), 16),
    "int8 by output": (CodeForm(kind=CodeKind.EIGHT_BITS, offset=Offset.MIDDLE, scales=torch.bfloat16), 4096),
    "fp8 by block": (CodeForm(kind=CodeKind.E4M3, offset=Offset.MIDDLE, scales=torch.float32), 128),
    "fp8 by output": (CodeForm(kind=CodeKind.E4M3, offset=Offset.MIDDLE, scales=torch.bfloat16), 4096),
}
"""Forms of codes, and inputs with one scale; 0: each names its group."""


def coded_matrix(form: CodeForm, group: int, outputs: int = 4096, inputs: int = 4096) -> CodedMatrix:
    """Without memory."""
    meta, is_packed = torch.device("meta"), form.kind is CodeKind.FOUR_BITS
    shape = outputs, inputs // (group or 128)
    kept = {Offset.ZERO_POINTS: torch.uint8, Offset.MINIMA: form.scales}.get(form.offset)
    width, dtype = (inputs // 8, torch.int32) if is_packed else (inputs, torch.uint8)
    return CodedMatrix(
        form=form,
        num_inputs=inputs,
        codes=torch.empty((outputs, width), dtype=dtype, device=meta),
        scales=torch.empty(shape, dtype=form.scales, device=meta),
        offsets=None if kept is None else torch.empty(shape, dtype=kept, device=meta),
        group_inputs=group,
        groups=None if group else torch.empty(inputs, dtype=torch.int32, device=meta),
    )
