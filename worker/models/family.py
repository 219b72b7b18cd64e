"""Statement of a model family: the meaning of config.json's entries and of the names of tensors for the model's
computation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Literal

from holdfast.worker.executors.layout_arithmetic import QueryScale, mamba_state_length
from holdfast.worker.models.encoder import Encoder

REQUIRED: Final = object()
"""Stands for the value of an entry that config.json must have."""


class NormKind(Enum):
    """A norm's formula, and where its weights are."""

    RMS = auto()
    RMS_PLUS_ONE = auto()
    """The weights are stored less one."""
    LAYER = auto()
    LAYER_PLUS_ONE = auto()
    LAYER_WITHOUT_WEIGHTS = auto()


class HeadNorms(Enum):
    """Norms of queries and keys before rotation, by the shape of their weights."""

    ONE_FOR_EACH = auto()
    """[head_dim]: the same for each head."""
    ONE_FOR_ALL = auto()
    """[heads * head_dim]: one norm over all heads together."""
    OWN = auto()
    """[heads, head_dim]: each head has its own."""
    OWN_APART = auto()
    """Like `OWN`, in one tensor [head_dim] for each head, `norms.N`."""


class Packing(Enum):
    """Storage of queries, keys and values."""

    APART = auto()
    """Three linears."""
    FUSED = auto()
    """One linear: all queries, then all keys, then all values."""
    HEAD_BY_HEAD = auto()
    """One linear: query, key and value of the first head, then of the next."""


class Windows(Enum):
    """Which layers have the sliding window of the config."""

    NONE = auto()
    ALL = auto()
    BY_TYPE = auto()
    """Windows of the layers whose `layer_types` entry is `sliding_attention`."""


class DeltaPacking(Enum):
    """Storage of Gated DeltaNet's inputs."""

    BY_KIND = auto()
    """`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`."""
    BY_KEY_HEAD = auto()
    """`in_proj_qkvz`: queries, keys, values and z of the first key head, then of the next; `in_proj_ba` likewise."""
    APART = auto()
    """Kimi Delta Attention, with the names of attention: `q_proj`, `k_proj`, `v_proj` and a convolution of each,
    `b_proj`, gates of two linears, `o_norm`, `o_proj`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Mamba2 in the layers whose type is `linear_attention` or `hybrid`. Names are of entries of config.json, but for
    the module.
    """

    module: str = "mamba"
    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    input_bias: str = "mamba_proj_bias"
    output_bias: str = "mamba_proj_bias"
    activation: str = "hidden_act"
    time_bounds: Callable[[Any], tuple[float, float]] = lambda config: tuple(config.time_step_limit)
    has_norm: "Setting" = True
    scales: Callable[[Any], "MambaScales"] = lambda config: MambaScales()
    refused: Callable[[Any], str | None] = lambda config: None
    """Part of a config that no layout can express; None: there is none."""

    def state_length(self, config: Any, num_drafts: int) -> int:
        """Numbers that the state of a sequence has in one layer, on one rank of one, by the most drafts of a step."""
        heads, size = int(getattr(config, self.num_heads)), int(getattr(config, self.head_dim))
        groups, states = int(getattr(config, self.num_groups)), int(getattr(config, self.state_dim))
        return mamba_state_length(groups, heads, states, size, int(getattr(config, self.width)) - 1 + num_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaScales:
    """Factors of the parts of Mamba2 (Falcon-H1)."""

    input: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """A layer that guesses the token after the next: `layer(input [norm(embedding) | norm(hidden)])`, with the
    attention of the model's layers, and separate keys and values. Names are of modules in `base`.
    """

    base: Callable[[Any], str]
    """Prefix of its tensors' names, by config."""
    layer: str
    input: str
    embedding_norm: str
    hidden_norm: str
    norm: str


Setting = str | bool
"""Whether something is there: always or never, or by the entry of config.json with this name."""


def is_set(setting: Setting, config: Any) -> bool:
    """A `Setting` for one model."""
    return bool(getattr(config, setting)) if isinstance(setting, str) else setting


def _every_layer(config: Any, index: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the MLP, in the layers that have one."""

    router: str = "gate"
    has_router_bias: bool = False
    exact_router: bool = False
    """The router is kept in float32."""
    top_k: str = "num_experts_per_tok"
    """The entry of config.json."""
    scoring: Literal["softmax", "softmax_of_top", "sigmoid"] = "softmax"
    selection_bias: str | None = None
    """The tensor that is added to the scores by which experts are chosen; [1, experts] if it `is_row`."""
    has_selection_bias: Setting = True
    is_row: bool = False
    num_groups: Callable[[Any], int] = lambda config: 1
    top_groups: Callable[[Any], int] = lambda config: 1
    group_best: int = 2
    """Number of a group's best scores that count."""
    normalized: Setting = True
    """The weights of the chosen experts are divided by their sum, or by `least_sum` where that is more."""
    least_sum: Callable[[Any], float] = lambda config: 0.0
    scale: Callable[[Any], float] = lambda config: 1.0
    """Multiplies the weights of the chosen experts."""
    scales: str | None = None
    """The tensor [experts] that multiplies them, instead."""
    num_experts: str = "num_local_experts"
    """The entry of config.json; likewise of the inner features of an expert."""
    inner: str = "intermediate_size"
    module: str | None = None
    """The mixture's module in a layer, if it is not the MLP's: then the MLP is the expert that every token goes
    through."""
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down, or of up and down of experts without gates, where the files have experts one by one
    (`experts.N.`). They may also have all of a layer together: `experts.gate_up_proj` [experts, gate and up, in], or
    `experts.up_proj`, and `experts.down_proj` [experts, out, inner]."""
    transposed: Setting = False
    """The weights of all experts of a layer together are [experts, in, out]."""
    clamped: bool = False
    """The experts are gpt-oss's: clamped SwiGLU, biases, gate and up interleaved, weights [experts, in, out]."""
    shared: str | None = None
    """The shared expert, with this many inner features; 0: there is none. Its weight is the
    sigmoid of the linear `shared_gate`."""
    shared_inner: Callable[[Any], int] = lambda config: 0
    shared_gate: str | None = None
    latent: Callable[[Any], int | None] = lambda config: None
    """Size of the experts' rows, where it is not the hidden one: `fc1_latent_proj` makes them of hidden rows, and
    `fc2_latent_proj` makes a hidden row of their sum."""
    in_layer: Callable[[Any, int], bool] = _every_layer
    """Whether a layer, by config and index, has the mixture; the others have the family's MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeBeside:
    """A mixture of experts beside the MLP, in all layers of a model that has one. Names are of modules in a layer."""

    moe: Moe
    is_there: Setting
    norm: str
    out_norm: str
    mlp_out_norm: str
    router_scale: str
    """Weights of the norm of the router's input; they are divided by the root of the hidden size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputs:
    """Inputs of layers' own (Gemma 4), where the entry `dim` of config.json is not 0. Names are of modules: of the
    model, then in a layer.
    """

    dim: str = "hidden_size_per_layer_input"
    vocabulary: str = "vocab_size_per_layer_input"
    table: str = "embed_tokens_per_layer"
    context: str = "per_layer_model_projection"
    context_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. The defaults are those of llama. Names are those of Hugging Face's modules."""

    architecture: str

    # config.json
    entries: Mapping[str, Any] = field(default_factory=dict)
    """Entries that the family reads beside the common ones, or with other defaults, with the value of a missing entry.
    `stated_config.py` knows the kind of each by its name.
    """
    derive: Callable[[Any], None] = lambda config: None
    """Sets values of the config that follow from others, as transformers' config does."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of entries, and the names that are used here."""

    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Entries that no layout can say, and the values under which they change nothing."""
    layer_types: frozenset[str] = frozenset({"full_attention", "sliding_attention"})
    """Kinds of layers that `layer_types` may name."""

    # tensors
    base: str = "model."
    embedding: str = "embed_tokens"
    layers: str = "layers."
    """Before the numbers of layers."""
    head_bias: bool = False
    stored_as: tuple[tuple[str, str], ...] = ()
    """Parts of the names of Hugging Face's modules, and what some files have in their place."""
    unused: tuple[str, ...] = ()
    """Patterns of the names of tensors that only draft; `{entry}` is an entry of config.json."""

    next_token: NextToken | None = None
    encoder: Encoder | None = None

    # norms
    norm: NormKind = NormKind.RMS
    norm_bias: Setting = False
    eps: str = "rms_norm_eps"
    """The entry of config.json."""
    final_norm: str = "norm"
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    parallel: Setting = False
    """Attention and MLP read the same residual."""
    shared_norm: bool = False
    """Whether they also share `attention_norm`."""

    # attention
    attention: str = "self_attn"
    packing: Packing = Packing.APART
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_bias: Setting = False
    output: str = "o_proj"
    output_bias: Setting = False
    head_norms: HeadNorms | None = None
    has_head_norms: Setting = True
    head_norm_bias: bool = False
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    norms_after_rotation: bool = False
    norms_values: bool = False
    """Over each head, without weights."""
    values_are_keys: Callable[[Any, int], bool] = lambda config, index: False
    """Whether a layer, by config and index, has no linear of values: they are keys before norm and rotation."""
    shared_kv: Callable[[Any, int], int | None] | None = None
    """Index of the layer before, by config and index, whose keys and values a layer reads; None: it has its own, as all
    have without such a rule."""
    query_scale: Callable[[Any], QueryScale | None] = lambda config: None
    scaling: Callable[[Any], float] = lambda config: float(config.head_dim**-0.5)
    """Scaling of attention scores."""
    value_scale: Callable[[Any], float] = lambda config: 1.0
    """Factor of values."""
    windows: Windows = Windows.NONE
    softcap: str | None = None
    """The entry of config.json that caps attention scores."""
    sinks: bool = False

    latent: bool = False
    """Multi-head latent attention, with the names of DeepSeek's modules and entries."""

    # layers without attention
    conv: str | None = None
    """The short convolution of layers whose type is `conv`."""
    state_lengths: Mapping[str, Callable[[Any, int], int]] = field(default_factory=dict)
    """Numbers of a sequence's state on one rank of one, by the config and the most drafts of a step, for each type of
    layer that keeps a state in place of keys and values."""
    mamba: Mamba | None = None
    has_single_halves: bool = False
    """A layer has one norm, `attention_norm`, and either what mixes tokens or an MLP, by its type: `mlp`, `moe`."""
    delta_net: DeltaPacking | None = None
    """Storage in layers whose type is `linear_attention`, of Gated DeltaNet."""
    has_output_gate: bool = False
    """`q_proj` has query and gate of the first head, then of the next; the gates' sigmoid multiplies the result."""

    # rotary angles
    theta: float = 10_000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The default rotary angles."""
    reads_old_rope: bool = True
    """Entries of config.json from before `rope_parameters` count, such as `rope_theta`."""
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of angles that the family's code takes for others."""
    local_theta: float | None = None
    """Angles by kind of layer: `full_attention`, `sliding_attention`. The default base of the latter."""
    partial: float | None = None
    """The share of a head's dimensions that turns, where config.json says none; None: all turn."""
    interleaved: Setting = False
    """Pairs are neighbours."""
    rotates: Callable[[Any, int], bool] = _every_layer
    """Whether a layer, by config and index, has position embeddings."""

    # MLP
    mlp: str = "mlp"  # empty: its linears are modules of the layer
    has_gate: bool = True
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name: gate and up in one linear, gate first; without a gate, the first linear."""
    down: str = "down_proj"
    inner: str = "intermediate_size"
    """The entry of config.json."""
    inner_factor: Callable[[Any, int], int] = lambda config, index: 1
    """Multiplies it, by config and index of a layer."""
    mlp_scales: Callable[[Any], tuple[float, float]] = lambda config: (1.0, 1.0)
    """Factors of the gate before the activation, and of the input of `down`."""
    mlp_bias: Setting = False
    activation: str = "hidden_act"
    """The entry of config.json."""
    moe: Moe | None = None
    beside: MoeBeside | None = None
    own_inputs: OwnInputs | None = None

    # scales
    output_scale: str | None = None
    """The tensor [1] that multiplies the residual stream at the end of a layer."""
    scales_embedding: bool = False
    """Whether it is scaled by the square root of the hidden size, rounded to the dtypes of the checkpoint and of
    serving."""
    embedding_scale: Callable[[Any], float] = lambda config: 1.0
    residual_scale: Callable[[Any], float] = lambda config: 1.0
    logit_scale: Callable[[Any], float] = lambda config: 1.0
    logit_softcap: str | None = None
    """The entry of config.json that caps logits."""

    def window_of(self, config: Any, index: int) -> int | None:
        """The sliding window of a layer, by config and index."""
        if self.windows is Windows.NONE:
            return None
        slides = self.windows is Windows.ALL or config.layer_types[index] == "sliding_attention"
        window: int | None = config.sliding_window if slides else None
        return window

    def kv_source(self, config: Any, index: int) -> int | None:
        """The layer whose keys and values a layer reads, by config and index; None: its own."""
        return None if self.shared_kv is None else self.shared_kv(config, index)

    @property
    def keeps_state(self) -> bool:
        """Whether some layers keep a state in place of keys and values, or beside them."""
        return bool(self.state_lengths)

    def keeps_kv(self, kind: str) -> bool:
        """Whether layers of this type keep keys and values."""
        return kind == "hybrid" or kind not in {*self.state_lengths, "mlp", "moe"}

    @property
    def on_cpus_alone(self) -> bool:
        """Whether GPUs have no native backend for it."""
        return self.keeps_state or self.latent or self.encoder is not None

    @property
    def may_be_uneven(self) -> bool:
        """Whether ranks may have unequal shares of a model on CPUs."""
        if self.moe is not None or self.delta_net is not None or self.mamba is not None or self.latent:
            return False
        return self.packing is Packing.APART and (len(self.gate_up) == 2 or not self.has_gate)
