"""Roofline of a model on a GPU: bytes and operations of each kernel of the GPU executor, over a device's rates. A step
takes at least this long; the rest is launches, the host, and kernels below the peak rates.

Figures of devices are those of their data sheets (NVIDIA A100 SXM 80 GB, H100 SXM, H200 SXM, B200 of HGX): dense
bfloat16 rates, without sparsity. NVLink rates are of one direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Capabilities of a GPU by its data sheet."""

    bytes_per_s: float
    """Bandwidth of its memory."""
    flops_per_s: float
    """Dense, bfloat16, float32 sums."""
    memory_bytes: int
    link_bytes_per_s: float
    """Bandwidth to the other GPUs of its host, in one direction."""


DEVICES: Final[Mapping[str, Device]] = {
    "a100": Device(bytes_per_s=2.039e12, flops_per_s=312e12, memory_bytes=80 * 10**9, link_bytes_per_s=300e9),
    "h100": Device(bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80 * 10**9, link_bytes_per_s=450e9),
    "h200": Device(bytes_per_s=4.8e12, flops_per_s=989e12, memory_bytes=141 * 10**9, link_bytes_per_s=450e9),
    "b200": Device(bytes_per_s=8.0e12, flops_per_s=2250e12, memory_bytes=180 * 10**9, link_bytes_per_s=900e9),
}

GRAPH_LAUNCH_S: Final = 1.5e-6
"""Between two kernels of a CUDA graph; an assumption, to be measured (`benchmarks/gpu`)."""

EAGER_LAUNCH_S: Final = 25e-6
"""A launch of a Triton kernel from Python; an assumption, to be measured."""

HOST_S: Final = 300e-6
"""The host's part of a step that nothing hides: the plan, its arrays, the tokens read back; an assumption."""

EXCHANGE_S: Final = 10e-6
"""Latency of a sum over ranks, or of another exchange; an assumption, for kernels in peers' memory (`docs/gpus.md`)."""

SECOND_WAIT_S: Final = 5e-6
"""Seconds of a second wait of a sum that is scattered and gathered; an assumption."""

SLICES: Final = 8
"""Slices of a sum over the inputs of a row-parallel linear, of all ranks together: they make it the same for any number
of ranks."""

_HALF, _FLOAT = 2, 4
SCATTERED: Final = {4: 384 << 10, 8: 128 << 10}
"""Values of a sum, by the number of ranks, from which on it is scattered and gathered (as `decoder/gpu/` has it)."""
_BEST_COLUMNS, _BEST_BYTES = 1024, 16
"""Logits of a block of which a rank reports the best, and bytes of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder whose MLPs, or experts, have gates. Inputs, and weights that are no codes, are bfloat16."""

    num_layers: int
    hidden: int
    inner: int
    """Inner size of each expert, if there are any."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    """Experts of each layer. 0: it has an MLP."""
    experts_per_token: int = 0
    shared_inner: int = 0
    """Inner size of the shared expert. 0: there is none."""
    kv_in_fp8: bool = False
    """Keys and values are kept in fp8."""
    weight_bits: float = 16.0
    """Bits of the layers' linears, scales and zero points included."""
    head_bits: float = 16.0

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a token's key or value of one head in the cache: in fp8, with a byte for the scale."""
        return self.head_dim + 1 if self.kv_in_fp8 else self.head_dim * _HALF

    @classmethod
    def of(
        cls, config: Any, *, kv_in_fp8: bool = False, weight_bits: float = 16.0, head_bits: float = 16.0
    ) -> "ModelShape":
        """Shape of a Hugging Face config. Raises ValueError for other kinds of model."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [name for name in names if not isinstance(getattr(config, name, None), int)]
        if missing:
            raise ValueError(f"the config has no {missing[0]}: `holdfast estimate --device` cannot model it")
        num_layers, hidden, inner, num_heads, vocab_size = (getattr(config, name) for name in names)
        num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
        is_mixed = getattr(config, "is_heterogeneous", False) or getattr(config, "n_routed_experts", None)
        if is_mixed or (num_experts and _has_dense_layers(config)):
            raise ValueError(
                f"{config.model_type} has layers of several kinds: `holdfast estimate --device` cannot model it"
            )
        return cls(
            num_layers=num_layers,
            hidden=hidden,
            inner=(num_experts and getattr(config, "moe_intermediate_size", None)) or inner,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or hidden // num_heads,
            vocab_size=vocab_size,
            num_experts=num_experts,
            experts_per_token=config.num_experts_per_tok if num_experts else 0,
            shared_inner=(num_experts and getattr(config, "shared_expert_intermediate_size", None)) or 0,
            kv_in_fp8=kv_in_fp8,
            weight_bits=weight_bits,
            head_bits=head_bits,
        )

    def experts_read(self, num_rows: int) -> float:
        """Experts whose weights a layer reads for this many rows, if each row chooses experts uniformly. That is an
        assumption: rows that are alike choose fewer.
        """
        return self.num_experts * (1.0 - (1.0 - self.experts_per_token / self.num_experts) ** num_rows)


def _has_dense_layers(config: Any) -> bool:
    return bool(getattr(config, "mlp_only_layers", None)) or getattr(config, "decoder_sparse_step", 1) != 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel in a step, on one rank."""

    name: str
    launches: int
    num_bytes: float
    flops: float

    def seconds(self, device: Device) -> float:
        """No less than this: memory or arithmetic, whichever takes longer."""
        return max(self.num_bytes / device.bytes_per_s, self.flops / device.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Costs on one rank of a step's sums that are the same for any number of ranks, and of plain ones beside them.

    The first go through float32 slices, which each rank adds, and float32 partial sums of all ranks: every rank reads
    them, or, if there are many values, only its share of them and the sums of the others. A plain all-reduce has one
    bfloat16 sum of each rank, and moves 2 (n - 1) / n of it.
    """

    slice_bytes: float
    """Written and read in a rank's memory because there is more than one slice."""
    link_bytes: float
    """Received from other ranks."""
    plain_link_bytes: float
    wait_s: float
    plain_wait_s: float

    def seconds(self, device: Device) -> float:
        return self.slice_bytes / device.bytes_per_s + self.link_bytes / device.link_bytes_per_s + self.wait_s

    def plain_seconds(self, device: Device) -> float:
        return self.plain_link_bytes / device.link_bytes_per_s + self.plain_wait_s


def _sums(shape: ModelShape, rows: int, tp: int) -> Sums:
    """Sums of the outputs of attention and MLPs."""
    num_sums, values = 2 * shape.num_layers, 2 * shape.num_layers * rows * shape.hidden
    scatters = tp in SCATTERED and rows * shape.hidden >= SCATTERED[tp]
    return Sums(
        slice_bytes=2.0 * (_num_parts(tp) - 1) * values * _FLOAT,
        link_bytes=(tp - 1) * values * _FLOAT * (2.0 / tp if scatters else 1.0),
        plain_link_bytes=2.0 * (tp - 1) / tp * values * _HALF,
        wait_s=num_sums * (EXCHANGE_S + scatters * SECOND_WAIT_S) if tp > 1 else 0.0,
        plain_wait_s=num_sums * EXCHANGE_S if tp > 1 else 0.0,
    )


def _num_parts(tp: int) -> int:
    """Slices of one rank."""
    return max(1, SLICES // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step on one rank of a replica."""

    kernels: tuple[Kernel, ...]
    device: Device
    exchanged_bytes: float
    """Bytes that a rank receives: in sums over ranks, of the embedding, of the best tokens."""
    wait_s: float
    """Latency of all of that."""
    in_graph: bool
    sums: "Sums"

    @property
    def kernel_s(self) -> float:
        return sum(kernel.seconds(self.device) for kernel in self.kernels)

    @property
    def exchange_s(self) -> float:
        return self.exchanged_bytes / self.device.link_bytes_per_s + self.wait_s

    @property
    def launch_s(self) -> float:
        """Launch time. With a graph: the gaps between kernels. Without one: the host's time beyond the kernels'."""
        launches = sum(kernel.launches for kernel in self.kernels)
        if self.in_graph:
            return launches * GRAPH_LAUNCH_S
        return max(0.0, launches * EAGER_LAUNCH_S - self.kernel_s)

    @property
    def seconds(self) -> float:
        return self.kernel_s + self.exchange_s + self.launch_s + HOST_S

    @property
    def share_of_kernels(self) -> float:
        """Share of the step that the device computes."""
        return self.kernel_s / self.seconds


def step_of(
    shape: ModelShape, device: Device, *, num_sequences: int, num_tokens: int, context: int, tp: int = 1
) -> Step:
    """A step of sequences that have `num_tokens` new tokens each and `context` tokens after it.

    Raises ValueError where the ranks cannot share the heads.
    """
    if shape.num_heads % tp:
        raise ValueError(f"tensor_parallel_size = {tp}: {shape.num_heads} heads are not shared evenly")
    decodes = num_tokens == 1
    kernels = tuple(_layers(shape, num_sequences, num_tokens, context, tp)) + _ends(
        shape, num_sequences, num_tokens, tp
    )
    rows = num_sequences * num_tokens
    sums = _sums(shape, rows, tp)
    best_bytes = num_sequences * -(-shape.vocab_size // tp // _BEST_COLUMNS) * _BEST_BYTES
    exchanged = sums.link_bytes + (tp - 1) * (rows * shape.hidden * _FLOAT + best_bytes)
    return Step(
        kernels=kernels,
        device=device,
        exchanged_bytes=exchanged,
        wait_s=sums.wait_s + (3 * EXCHANGE_S if tp > 1 else 0.0),
        in_graph=decodes,
        sums=sums,
    )


def _layers(shape: ModelShape, num_sequences: int, num_tokens: int, context: int, tp: int) -> list[Kernel]:
    rows, layers, hidden = num_sequences * num_tokens, shape.num_layers, shape.hidden
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    width, both = heads * shape.head_dim, (heads + 2 * kv_heads) * shape.head_dim
    inner, parts = shape.inner // tp, _num_parts(tp)
    fed = 1 if shape.num_experts else parts
    seen = num_sequences * (num_tokens * context - num_tokens * (num_tokens - 1) // 2)
    kv_bytes = 2 * num_sequences * context * kv_heads * shape.kv_row_bytes
    split_bytes = rows * (both * _FLOAT + width * _HALF + 2 * kv_heads * shape.kv_row_bytes)
    return [
        _linear("qkv", layers, rows, hidden, both, 1, shape.weight_bits),
        Kernel("heads", layers, layers * split_bytes, 0.0),
        Kernel("attention", layers, layers * (kv_bytes + 2 * rows * width * _HALF), layers * 4.0 * seen * width),
        _linear("output", layers, rows, width, hidden, parts, shape.weight_bits),
        *(_experts(shape, rows, tp, parts) if shape.num_experts else _mlp(shape, rows, inner, parts)),
        Kernel("add and norm", 2 * layers, layers * rows * hidden * (_FLOAT * (parts + fed + 4) + 2 * _HALF), 0.0),
    ]


def _mlp(shape: ModelShape, rows: int, inner: int, parts: int, prefix: str = "") -> list[Kernel]:
    layers, hidden, bits = shape.num_layers, shape.hidden, shape.weight_bits
    return [
        _linear(f"{prefix}gate and up", layers, rows, hidden, 2 * inner, 1, bits),
        Kernel(f"{prefix}activation", layers, layers * rows * inner * (2 * _FLOAT + _HALF), 0.0),
        _linear(f"{prefix}down", layers, rows, inner, hidden, parts, bits),
    ]


def _experts(shape: ModelShape, rows: int, tp: int, parts: int) -> list[Kernel]:
    """Kernels of the experts' linears: weights of the chosen experts, and rows once for each of their experts."""
    layers, hidden, inner, count = shape.num_layers, shape.hidden, shape.inner // tp, shape.num_experts
    chosen, read = rows * shape.experts_per_token, shape.experts_read(rows)
    has_shared = shape.shared_inner > 0
    shared = _mlp(shape, rows, shape.shared_inner // tp, parts, "shared ") if has_shared else []
    sums = parts * (chosen + rows * has_shared) + rows
    return [
        _linear("router", layers, rows, hidden, count + has_shared, 1, 16.0),
        Kernel("choice", 2 * layers, layers * (rows * count + 4 * chosen) * _FLOAT, 0.0),
        *shared,
        _linear("gate and up", layers, chosen, hidden, 2 * inner, 1, shape.weight_bits, read),
        Kernel("activation", layers, layers * chosen * inner * (2 * _FLOAT + _HALF), 0.0),
        _linear("down", layers, chosen, inner, hidden, parts, shape.weight_bits, read),
        Kernel("sum of experts", layers, layers * sums * hidden * _FLOAT, 0.0),
    ]


def _ends(shape: ModelShape, num_sequences: int, num_tokens: int, tp: int) -> tuple[Kernel, ...]:
    vocab, rows = shape.vocab_size // tp, num_sequences * num_tokens
    return (
        Kernel("embedding", 2, rows * shape.hidden * (_HALF + _FLOAT), 0.0),
        _linear("head", 1, num_sequences, shape.hidden, vocab, 1, shape.head_bits),
        Kernel("best token", 2, num_sequences * vocab * _FLOAT, 0.0),
    )


def _linear(
    name: str, launches: int, rows: int, inputs: int, outputs: int, parts: int, bits: float, num_weights: float = 1.0
) -> Kernel:
    """Weights of this many bits and inputs are read once, and float32 outputs written, one for each part of the sum."""
    num_bytes = num_weights * inputs * outputs * bits / 8 + rows * inputs * _HALF + parts * rows * outputs * _FLOAT
    return Kernel(name, launches, launches * num_bytes, launches * 2.0 * rows * inputs * outputs)


def weight_bytes(shape: ModelShape, tp: int = 1) -> int:
    """Bytes of one rank's weights, the embedding's table and the head included."""
    heads = shape.num_heads // tp + 2 * max(1, shape.num_kv_heads // tp) + shape.num_heads // tp
    inner = max(1, shape.num_experts) * (shape.inner // tp) + shape.shared_inner // tp
    router = shape.num_experts + (shape.shared_inner > 0)
    of_linears = shape.hidden * (heads * shape.head_dim + 3 * inner)
    layers = shape.num_layers * (of_linears * shape.weight_bits / 8 + shape.hidden * router * _HALF)
    return int(layers + shape.hidden * (shape.vocab_size // tp) * (_HALF + shape.head_bits / 8))


def kv_bytes_per_token(shape: ModelShape, tp: int = 1) -> int:
    """Bytes of one rank's cache."""
    return 2 * shape.num_layers * max(1, shape.num_kv_heads // tp) * shape.kv_row_bytes
