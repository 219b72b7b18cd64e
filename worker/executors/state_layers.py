"""Layers of a decoder layout that keep a state: short convolution, Gated DeltaNet and Mamba2. Plain data."""

from dataclasses import dataclass

from torch import Tensor

from holdfast.worker.executors.layout_arithmetic import NUM_SLICES, delta_state_length, mamba_state_length
from holdfast.worker.executors.linears import Linear, Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Short convolution over this rank's channels: `output(C * conv(B * x))`, where `conv` is causal and depthwise.

    The state of a sequence: the last inputs of the convolution, `B * x`, in float32 (docs/state-cache.md).
    """

    num_channels: int
    """Channels of this rank."""
    inputs: Linear
    """Outputs: B of all channels, then C, then x."""
    kernel: Tensor
    """float32 [channels, width]: the last column weighs a token itself, the one before it the token before."""
    bias: Tensor | None = None
    """float32 [channels], of the convolution."""
    output: Linear
    """Row-parallel."""
    num_slices: int = NUM_SLICES
    """Slices of this rank's inputs of `output`."""

    @property
    def width(self) -> int:
        return int(self.kernel.shape[1])

    def state_length(self, num_drafts: int) -> int:
        """Numbers that a slot keeps: the inputs before a token, and those of drafts that may turn out wrong."""
        return self.num_channels * (self.width - 1 + num_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Gated DeltaNet over this rank's heads: value head h goes with key head `h // (value heads / key heads)`.

        q, k, v = silu(conv(x W));  q, k over their lengths, q / sqrt(key_dim);  rate = sigmoid(b)
        decay = exp(-exp(a_log) softplus(a + dt_bias));  S = decay S;  S = S + k (x) rate (v - S^T k);  o = S^T q
        output(rms(o) weight silu(z))

    As Hugging Face's `Qwen3_5GatedDeltaNet`, all in float32. With `gates` Kimi Delta Attention, as in Hugging Face's
    `KimiLinearDeltaAttention`: each key of a head has an `a` and a decay, and sigmoid(z) is in place of silu. The state
    of a sequence: S of each value head, float32 [key_dim, value_dim], and the last inputs of the convolution
    (docs/gated-delta-net.md).
    """

    num_key_heads: int
    """Key heads of this rank; all counts are of this rank."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    """Both multiples of 16."""
    inputs: Linear
    """Outputs: queries and keys of all key heads, values of all value heads; z, as values; b, then a, of each value
    head. With `gates` there is no z, and their inputs are in place of a."""
    rates: Linear | None = None
    """The last outputs of `inputs`, from b on, where these are quantized in another way."""
    gates: Linear | None = None
    """Outputs: a of each key of each value head, then z."""
    kernel: Tensor
    """float32 [channels of queries, keys and values, width], as of `ShortConv`."""
    a_log: Tensor
    """float32 [value heads]"""
    dt_bias: Tensor
    """float32 [value heads]; with `gates` [value heads, keys]"""
    norm: Norm
    """Over the values of each head."""
    output: Linear
    """Row-parallel."""
    num_slices: int = NUM_SLICES
    """Slices of this rank's inputs of `output`."""

    @property
    def width(self) -> int:
        return int(self.kernel.shape[1])

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def gate_inputs(self) -> int:
        """Outputs of `inputs` that `gates` takes."""
        if self.gates is None:
            return 0
        rates = self.inputs.out_features - self.num_channels if self.rates is None else self.rates.out_features
        return rates - self.num_value_heads

    def state_length(self, num_drafts: int) -> int:
        """Numbers that a slot keeps: rows of inputs, then for each key head a header and the tiles of its value heads
        (`cpu/native/recurrence_task.h`).
        """
        return delta_state_length(
            self.num_key_heads,
            self.num_value_heads,
            self.key_dim,
            self.value_dim,
            self.width - 1 + num_drafts,
            by_key=self.gates is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba2 over this rank's heads: head h goes with group `h // (heads / groups)`.

        C, B, x = silu(conv(x W));  time = clamp(softplus(dt_scale dt + dt_bias));  decay = exp(-exp(a_log) time)
        S = decay S + B (x) time x;  y = (S^T C + skip x) silu(z_scale z);  output(norm(y))

    As Hugging Face's `GraniteMoeHybridMambaLayer` and others, all in float32; `norm` is an RMSNorm over groups of
    heads, which several ranks may share. The state of a sequence: S of each head, float32 [state_dim,
    head_dim], and the last inputs of the convolution (docs/mamba2.md).
    """

    num_groups: int
    """Groups of this rank; all counts are of this rank. With fewer groups than ranks, neighbours have the same."""
    num_heads: int
    state_dim: int
    head_dim: int
    """Both multiples of 16."""
    inputs: Linear
    """Outputs: C, then B of all groups, x of all heads; z, as x; dt of each head."""
    kernel: Tensor
    """float32 [channels of C, B and x, width], as of `ShortConv`."""
    conv_bias: Tensor | None = None
    """float32 [channels]"""
    a_log: Tensor
    """float32 [heads], as the next two."""
    dt_bias: Tensor
    skip: Tensor
    dt_scale: float = 1.0
    z_scale: float = 1.0
    time_bounds: tuple[float, float]
    """The least and the most of a time step."""
    norm: Norm
    """Norm whose weights, [heads * head_dim], also multiply parts that are not normed."""
    norm_heads: int
    """Heads of the whole model that are normed together; 0: none are."""
    norm_groups: int
    """Number of ranks' shares of groups in the whole model."""
    first_group: int
    """The first of them that this rank has a part of."""
    output: Linear | None
    """Row-parallel. None beside attention: then its inputs are those of `Attention.output` (`Layer.state`)."""
    num_slices: int = NUM_SLICES
    """Slices of this rank's inputs of the output."""

    @property
    def width(self) -> int:
        return int(self.kernel.shape[1])

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_groups * self.state_dim + self.num_heads * self.head_dim

    def state_length(self, num_drafts: int) -> int:
        """Numbers that a slot keeps, as of `GatedDeltaNet`."""
        rows = self.width - 1 + num_drafts
        return mamba_state_length(self.num_groups, self.num_heads, self.state_dim, self.head_dim, rows)
