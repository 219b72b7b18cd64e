"""Decoder layout: a transformer, decoder or encoder, as plain data, as one rank's share, which executors run.

A layer computes, with `x` [T, hidden] the residual stream (float32) and each norm optional:

    sequential:  x += scale * out_norm(attention(norm(x)));  x += scale * out_norm(mlp(norm(x))); either may be missing
    parallel:    x += attention(norm(x)) + mlp(norm of its own, or the same norm(x))

Where a norm stays (`Norm.stays`), x = norm(x) comes first: so norms behind a residual sum (BERT) are those before the
next half, and the last layer's is `DecoderLayout.norm`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.worker.executors.layout_arithmetic import NUM_SLICES, QueryScale
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2, ShortConv


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding: the angle of pair i at position p is `p * inverse_frequencies[i]`."""

    inverse_frequencies: Tensor
    """float32 [rotated dimensions / 2]"""
    scaling: float = 1.0
    """Multiplies sines and cosines (YaRN, longrope)."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), not halves (i, i + n / 2), of the first n dimensions of a head."""

    @property
    def num_dims(self) -> int:
        """Dimensions that turn; the others of a head stay as they are."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention over this rank's heads."""

    num_heads: int
    num_kv_heads: int
    first_kv_head: int = 0
    """Number of its first KV head in the whole model."""
    head_dim: int
    qkv: Linear
    """Outputs: all query heads, then all key heads, then all value heads. The queries alone with a `kv_source`."""
    kv_source: int | None = None
    """Layer before this one, with KV heads of the same number and size and the same window, whose keys and values are
    read; None: its own."""
    has_gate: bool = False
    """Outputs have one gate for each query behind the queries; the result is multiplied by their sigmoid."""
    query_norm: Norm | None = None
    """Before rotation: over each head, or over all heads together where the weight is [num_heads * head_dim]."""
    key_norm: Norm | None = None
    norms_after_rotation: bool = False
    """Both norms, which are over each head then."""
    value_norm: Norm | None = None
    """Over each head."""
    query_scale: QueryScale | None = None
    value_scale: float = 1.0
    """Multiplies values."""
    rotary: int | None
    """Index into `DecoderLayout.rotaries`. None: no position embedding."""
    scaling: float
    sliding_window: int | None = None
    """A query sees itself and this many keys less one before it."""
    sees_behind: bool = False
    """A query also sees the keys behind it, to the end of its sequence or as many: an encoder, whose prompts are
    computed in one step."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """float32 [num_heads]: one more score in each softmax, without a value."""
    output: Linear
    """Row-parallel."""
    num_slices: int = NUM_SLICES
    """Slices of this rank's inputs of `output`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention over this rank's heads (DeepSeek), in its absorbed form:

        a | c | r = inputs(x);  c = latent_norm(c), r turned;  q | p of each head = queries(query_norm(a)), p turned
        score = scaling ((q A^T) c + p r), with A of the head;  output((what the softmax weighs of c) V^T, of each head)

    What is kept of a token is c | r, once for all heads: every rank has it. Without `queries`, a is q | p of each head.
    """

    num_heads: int
    plain_dim: int
    """Dimension of a head's q without rotation."""
    rope_dim: int
    latent_dim: int
    value_dim: int
    inputs: Linear
    """Outputs: a, then c, then r."""
    query_norm: Norm | None = None
    queries: Linear | None = None
    """Outputs: q and p of the first head, then of the next."""
    latent_norm: Norm
    absorb: Linear
    """A of each head: [latent_dim, plain_dim]."""
    expand: Linear
    """V of each head: [value_dim, latent_dim]."""
    rotary: int | None
    """Index into `DecoderLayout.rotaries`. None: no position embedding."""
    scaling: float
    output: Linear
    """Row-parallel."""
    num_slices: int = NUM_SLICES
    """Slices of this rank's inputs of `output`."""

    @property
    def key_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.latent_dim + self.rope_dim

    @property
    def query_outputs(self) -> int:
        """Outputs of `inputs`."""
        return self.inputs.out_features - self.key_dim


MAX_CONV_WIDTH: Final = 8
"""Tokens that a convolution sees at most (`cpu/native/short_conv.h`)."""


class Activation(Enum):
    """Activation function of an MLP; for an MLP with a gate, of the gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up within 7 of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """`down(activation(gate) * up)`, or `down(activation(up))` where there is no gate."""

    activation: Activation
    has_gate: bool
    up: Linear
    """Outputs: gate, then up; or up alone."""
    gate_scale: float = 1.0
    """Multiplies the gate before the activation."""
    inner_scale: float = 1.0
    """Factor on the input of `down`. Both are one where there is no gate."""
    down: Linear
    """Row-parallel."""
    num_slices: int = NUM_SLICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: the sum over the chosen experts, by ascending expert, of weight times expert."""

    router: Linear
    """[num_experts, hidden], in the serving dtype or in float32; the same on every rank."""
    top_k: int
    scoring: Literal["softmax", "softmax_of_top", "sigmoid"]
    """Softmax over all experts, or over the chosen ones alone (gpt-oss)."""
    selection_bias: Tensor | None = None
    """float32 [num_experts]: added to the scores by which experts are chosen, not to their weights."""
    num_groups: int = 1
    """Neighbouring experts are a group; where there are several, only those of `top_groups` groups are chosen."""
    top_groups: int = 1
    """Groups that are chosen: those with the largest sums of their `group_best` best scores."""
    group_best: int = 2
    normalized: bool
    """The weights of the chosen experts are divided by their sum."""
    least_sum: float = 0.0
    """Least sum that scores are divided by."""
    scales: Tensor | None = None
    """float32 [num_experts]: multiply the weights of the chosen experts."""
    experts: tuple[Mlp, ...]
    shared: Mlp | None = None
    """An expert that every token goes through."""
    shared_gate: Linear | None = None
    """[1, hidden]: the shared expert is weighted by the sigmoid of this."""
    latent: Linear | None = None
    """[latent, hidden], whole on every rank: experts take its output in place of the hidden rows (Nemotron 3 Super).
    Their `up` is whole on every rank, their `down` [latent of this rank, inner], in one slice. Each slice of the inputs
    of `shared.down` is a part of the experts' sum, which becomes hidden rows with it, then the shared expert's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A mixture of experts beside a layer's MLP (Gemma 4), in place of the MLP alone:

    mlp_out_norm(mlp(mlp_norm(x))) + out_norm(experts(norm(x))), where the router is given router_norm(x)
    """

    experts: Experts
    """Experts beside which every token passes through another MLP."""
    norm: Norm
    router_norm: Norm
    out_norm: Norm
    mlp_out_norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """Part of a layer that reads its own input (Gemma 4): `x += norm(projection(activation(gate(x)) * p))` at its end,
    where p [T, `TokenInputs.dim`] is the layer's part of `TokenInputs`. All ranks compute all of it.
    """

    gate: Linear
    """[dim, hidden]"""
    activation: Activation
    projection: Linear
    """[hidden, dim]"""
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Inputs of the layers by token, computed once for a step from what enters the first layer, e [T, hidden]:

    p = (norm(context_scale * context(e)) + table_scale * table[token]) * scale, normed over the `dim` of each layer
    """

    table: Tensor | Linear
    """[vocabulary, layers * dim], in the serving dtype or as units. Rows are looked up: on every rank the whole table,
    numbers as they are mapped."""
    context: Linear
    """[layers * dim, hidden]"""
    norm: Norm
    """[dim]: the same for each layer."""
    dim: int
    table_scale: float
    context_scale: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """Rows that are added to a token's embedding by its place, on every rank the same."""

    positions: Tensor
    """[positions, hidden]"""
    segments: Tensor
    """[2, hidden]: of the tokens of a prompt's first text, and of its second; the same where a model tells them not
    apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a decoder: norms, a mixer of tokens, and an MLP or experts, in the order that they run."""

    attention_norm: Norm | None
    """Norm of attention, or of the module in its place."""
    attention: Attention | LatentAttention | None
    state: ShortConv | GatedDeltaNet | Mamba2 | None = None
    """Mixer of tokens in place of attention that keeps a state; None: attention, or a layer that is an MLP alone.
    Mamba2 may also be beside attention, of the same norm: then each slice of the inputs of `Attention.output` has
    values of attention first, and those of Mamba2 behind them."""
    attention_out_norm: Norm | None = None
    mlp_norm: Norm | None
    mlp: Mlp | Experts | None
    """None: the layer mixes tokens alone."""
    beside: Beside | None = None
    """Only where `mlp` is an `Mlp` and there is an `mlp_out_norm`."""
    mlp_out_norm: Norm | None = None
    residual_scale: float = 1.0
    input: LayerInput | None = None
    """Only where the layout has `inputs`, and the MLP is not parallel."""
    output_scale: float = 1.0
    """Multiplies the residual stream at the end of the layer. Only where there is an `mlp_out_norm`."""
    parallel: bool = False
    """Attention and MLP read the same residual; without an `mlp_norm` they share `attention_norm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayout:
    """One rank's share of a model."""

    dtype: torch.dtype
    """Dtype of the linears' weights and inputs: bfloat16, float16 or float32."""
    hidden_size: int
    vocab_size: int
    """Vocabulary of the whole model, without padding."""
    embedding: Tensor
    """[rows of this rank, hidden], serving dtype. Rows of all ranks follow each other; the last rank's are padded.
    On the meta device where it is the head's too, whose units have its numbers."""
    embedding_scale: float = 1.0
    places: TokenPlaces | None = None
    """Learned positions."""
    inputs: TokenInputs | None = None
    """Inputs of the layers' own, beside the residual stream."""
    rotaries: tuple[Rotary, ...]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    """[rows of this rank, hidden]; may be the embedding's own tensor."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def attention_of(layer: Layer) -> Attention:
    """The attention of a layer that keeps keys and values of its KV heads."""
    assert isinstance(layer.attention, Attention), "it has latent attention, or a state"
    return layer.attention


def kv_source(layer: Layer) -> int | None:
    """Index of the layer whose keys and values this one reads; None: its own, or none."""
    return layer.attention.kv_source if isinstance(layer.attention, Attention) else None


def has_state(layout: DecoderLayout) -> bool:
    """Whether any layer keeps a state."""
    return any(layer.state is not None for layer in layout.layers)
