"""Tensor-parallel plan of a model: Hugging Face's plan, read as cuts of its parameters. An unknown style is an error: a
layer that is wrongly replicated next to a split one silently gives wrong numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.checks import check_heads
from holdfast.worker.models.family_rules import num_kv_heads


class Split(Enum):
    """Split of a linear (or a bare parameter) among ranks that share a model."""

    WHOLE = auto()
    """Every rank has all of it."""
    COLUMNS = auto()
    """Each rank computes some of the outputs."""
    ROWS = auto()
    """Each rank takes some of the inputs; the outputs are partial sums."""
    SUM = auto()
    """The module's parameters are split one by one; its result is a partial sum."""
    ONCE = auto()
    """The first rank has it, the others have zeros: a bias inside a partial sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way of splitting. `whole_activations`: outputs are gathered (columns), or inputs arrive whole (rows)."""

    split: Split = Split.WHOLE
    whole_activations: bool = False
    num_packed: int = 1
    """Equal matrices fused into one, each of which is cut by itself (gate and up)."""
    packed_heads: bool = False
    """Queries, keys and values fused into one matrix, in this order."""


_WHOLE = Style()
_SUM = Style(split=Split.SUM)

STYLES: Final[Mapping[str, Style]] = {
    "colwise": Style(split=Split.COLUMNS),
    "colwise_gather_output": Style(split=Split.COLUMNS, whole_activations=True),
    "colwise_rep": Style(split=Split.COLUMNS, whole_activations=True),
    "packed_colwise": Style(split=Split.COLUMNS, num_packed=2),
    "three_packed_colwise": Style(split=Split.COLUMNS, num_packed=3),  # this name is ours
    "rowwise": Style(split=Split.ROWS),
    "rowwise_split_input": Style(split=Split.ROWS, whole_activations=True),
    "rowwise_rep": Style(split=Split.ROWS, whole_activations=True),
    "packed_rowwise": Style(split=Split.ROWS, num_packed=2),
    "moe_tp_experts": _SUM,
    "all_reduce": _SUM,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "local_params": _WHOLE,
    "embedding_rowwise": _WHOLE,  # the vocabulary's embedding and head are split in any case, others are small
    "embedding_colwise": _WHOLE,
    "fused_heads": Style(split=Split.COLUMNS, packed_heads=True),  # this name and the next are ours
    "first_rank": Style(split=Split.ONCE),
}

_NORMED_HEADS: Final = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
"""Settings under which each head has a separate norm, which heads that moved to another rank would miss."""

_GATHERED: Final = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}


def _rules(prefix: str, style: str, *names: str) -> dict[str, str]:
    return {prefix + name: style for name in names}


def _attention(prefix: str, output: str = "o_proj") -> dict[str, str]:
    return _rules(prefix, "colwise", "q_proj", "k_proj", "v_proj") | _rules(prefix, "rowwise", output)


_ATTENTION: Final = _attention("model.layers.*.self_attn.")
_MLP: Final = _rules("model.layers.*.mlp.", "colwise", "gate_proj", "up_proj") | {
    "model.layers.*.mlp.down_proj": "rowwise"
}

_FUSED_MLP: Final = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
_LFM2: Final = (
    _attention("model.layers.*.self_attn.", "out_proj")
    | _rules("model.layers.*.conv.", "three_packed_colwise", "in_proj")
    | {"model.layers.*.conv.out_proj": "rowwise", "model.layers.*.feed_forward.w2": "rowwise"}
    | _rules("model.layers.*.feed_forward.", "colwise", "w1", "w3")
)

_GPT_OSS_EXPERTS: Final = {  # stored as [expert, input, output], gate and up interleaved
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
    "model.layers.*.mlp.experts.down_proj": "colwise",
    "model.layers.*.mlp.experts.down_proj_bias": "first_rank",
}


def _mamba(prefix: str) -> dict[str, str]:
    """Split of Mamba2: its few groups' B and C, which neighbours may share, count as cut."""
    return {f"{prefix}in_proj": "colwise", f"{prefix}out_proj": "rowwise"}


def _experts(prefix: str, first: str, style: str) -> dict[str, str]:
    """Split of stacked experts: not every version of transformers that is supported states it for these families."""
    return {
        f"{prefix}experts": "moe_tp_experts",
        f"{prefix}experts.{first}": style,
        f"{prefix}experts.down_proj": "rowwise",
    }


_FEED_FORWARD: Final = _rules("model.layers.*.feed_forward.", "colwise", "gate_proj", "up_proj") | {
    "model.layers.*.feed_forward.down_proj": "rowwise"
}
_OVERRIDES: Final[Mapping[str, Mapping[str, str]]] = {
    "bamba": _ATTENTION | _FEED_FORWARD | _mamba("model.layers.*.mamba."),
    "biogpt": _attention("biogpt.layers.*.self_attn.", "out_proj")
    | {"biogpt.layers.*.fc1": "colwise", "biogpt.layers.*.fc2": "rowwise"},
    "deepseek_v3": _rules("model.layers.*.self_attn.", "colwise", "q_proj", "q_b_proj", "kv_b_proj")
    | {"model.layers.*.self_attn.o_proj": "rowwise"},
    "falcon_h1": _ATTENTION | _FEED_FORWARD | _mamba("model.layers.*.mamba."),
    "glm": _FUSED_MLP,
    "glm4": _FUSED_MLP,
    "gpt2": _rules("transformer.h.*.", "rowwise", "attn.c_proj", "mlp.c_proj")
    | {"transformer.h.*.attn.c_attn": "fused_heads", "transformer.h.*.mlp.c_fc": "colwise"},
    "gpt_bigcode": _rules("transformer.h.*.", "colwise_gather_output", "attn.c_attn")
    | {"transformer.h.*.attn.c_proj": "rowwise_split_input"}
    | {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"},
    "gpt_oss": _ATTENTION | {"model.layers.*.self_attn.sinks": "colwise"} | _GPT_OSS_EXPERTS,
    "granitemoe": _ATTENTION,
    "granitemoehybrid": _ATTENTION
    | _mamba("model.layers.*.mamba.")
    | _experts("model.layers.*.block_sparse_moe.", "gate_up_proj", "packed_colwise")
    | {
        "model.layers.*.shared_mlp.input_linear": "packed_colwise",
        "model.layers.*.shared_mlp.output_linear": "rowwise",
    },
    "granitemoeshared": _ATTENTION,
    "hunyuan_v1_dense": _ATTENTION | _MLP,
    "hunyuan_v1_moe": _ATTENTION
    | _rules("model.layers.*.mlp.shared_mlp.", "colwise", "gate_proj", "up_proj")
    | {"model.layers.*.mlp.shared_mlp.down_proj": "rowwise"},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "mamba2": _mamba("backbone.layers.*.mixer."),
    "nemotron_h": _attention("model.layers.*.mixer.")
    | _mamba("model.layers.*.mixer.")
    | _experts("model.layers.*.mixer.", "up_proj", "colwise")
    | _rules("model.layers.*.mixer.", "colwise", "up_proj", "shared_experts.up_proj")
    | _rules("model.layers.*.mixer.", "rowwise", "down_proj", "shared_experts.down_proj"),
    "nemotron": _ATTENTION | {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"},
    "opt": _attention("model.decoder.layers.*.self_attn.", "out_proj")
    | {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"},
    "persimmon": _rules("model.layers.*.", "colwise", "self_attn.query_key_value", "mlp.dense_h_to_4h")
    | _rules("model.layers.*.", "rowwise", "self_attn.dense", "mlp.dense_4h_to_h"),
    "phi3": _FUSED_MLP
    | {"model.layers.*.self_attn.qkv_proj": "fused_heads", "model.layers.*.self_attn.o_proj": "rowwise"},
    "phimoe": _ATTENTION,
    "qwen2_moe": _rules("model.layers.*.mlp.shared_expert.", "colwise", "gate_proj", "up_proj")
    | {"model.layers.*.mlp.shared_expert.down_proj": "rowwise"},
    "stablelm": _ATTENTION | _MLP,
}

_LATENT_EXPERTS: Final = {
    "model.layers.*.mixer.experts.up_proj": "replicate",
    "model.layers.*.mixer.fc2_latent_proj": "rowwise",
}
"""Split of experts whose rows are not hidden ones: by their outputs."""

LOCAL_COUNTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("split_size",),
    "opt": ("num_heads",),
    "persimmon": ("num_heads",),
    "phi3": ("config.num_attention_heads", "num_key_value_heads"),
    "stablelm": ("num_heads", "num_key_value_heads"),
}
"""Attributes of attention modules that the modeling code shapes its tensors by: a rank needs its own share there."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of a dimension, in `num_chunks` equal chunks, such as the queries of a fused QKV.

    With fewer chunks than ranks, neighbouring ranks hold the same chunk; with `shares`, each holds its number of
    chunks.
    """

    length: int
    num_chunks: int
    shares: tuple[int, ...] | None = None

    def of_rank(self, rank: int, size: int) -> tuple[int, int]:
        """Start and length of a rank's share."""
        chunk = self.length // self.num_chunks
        if self.shares is None:
            return chunk * (rank * self.num_chunks // size), chunk
        return chunk * sum(self.shares[:rank]), chunk * self.shares[rank]

    @property
    def most(self) -> int:
        """The length of the largest share."""
        return self.length // self.num_chunks * max(self.shares or (1,))


class Stored(Protocol):
    """A tensor that gives its numbers once they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> "Stored": ...

    def filled_up(self, num_rows: int, /) -> "Stored":
        """Rows in all, zeros behind its own."""
        ...

    def narrow(self, dim: int, start: int, length: int, /) -> "Stored":
        """Same as `torch.Tensor.narrow`."""
        ...

    def to(self, dtype: torch.dtype, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Split of one dimension of a parameter: each rank takes its chunk of every segment."""

    dim: int
    segments: tuple[Segment, ...]

    def take(self, whole: Tensor | Stored, rank: int, size: int) -> Any:
        """This rank's share: a view where there is one segment, else a new tensor."""
        pieces: list[Any] = []
        start = 0
        for segment in self.segments:
            first, length = segment.of_rank(rank, size)
            pieces.append(whole.narrow(self.dim, start + first, length))
            start += segment.length
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    @property
    def share(self) -> float:
        """The fraction of the parameter that one rank holds, at most."""
        kept = sum(segment.most for segment in self.segments)
        return kept / sum(segment.length for segment in self.segments)


class ParallelPlan:
    """The styles of one model at one number of ranks; on one rank everything is whole.

    Raises `UnsupportedModelError` where the model cannot be split over that many.
    """

    def __init__(self, config: Any, rules: Mapping[str, str], size: int, *, may_be_uneven: bool = False) -> None:
        """`may_be_uneven`: ranks may have unequal shares, if no linear is fused."""
        self.config = config
        self.size = size
        self._may_be_uneven = may_be_uneven
        self.shares: tuple[int, ...] | None = None
        """Equal parts of the model that each rank has, where ranks cannot share it evenly."""
        self._of_ranks = _complete(config, rules)
        self._rules = self._of_ranks if size > 1 else {}
        if size > 1:
            self._check()

    @property
    def splits_attention(self) -> bool:
        """Each rank has its own heads; otherwise all ranks compute (and cache) all of them."""
        names = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value", "c_attn")
        return any(
            rule.endswith(names) and STYLES[style].split is Split.COLUMNS and not STYLES[style].whole_activations
            for rule, style in self._rules.items()
        )

    def style(self, name: str) -> Style:
        """The style of a module, or of a bare parameter, by its full name."""
        return STYLES[self._rules.get(_generic(name), "replicate")]

    def is_summed(self, name: str) -> bool:
        """Whether more ranks than one share the inputs of a linear of this full name, however many there are now."""
        style = STYLES.get(self._of_ranks.get(_generic(name), "replicate"))
        return style is not None and style.split is Split.ROWS

    def parameter_style(self, name: str) -> Style:
        """The style of a parameter: its own, else its module's. The bias of a sum over ranks is whole."""
        owner, _, kind = name.rpartition(".")
        own, around = self.style(name), self.style(owner)
        if own.split is not Split.WHOLE or around.split is Split.SUM:
            return own
        return _WHOLE if around.split is Split.ROWS and kind == "bias" else around

    def cut(self, name: str, shape: tuple[int, ...], head_dim: int | None) -> Cut | None:
        """Cut of the parameter of this full name and shape; None: no rank has less than all of it.

        `head_dim` is that of the attention module around it, if there is one.
        """
        style = self.parameter_style(name)
        if style.split not in (Split.COLUMNS, Split.ROWS):
            return None
        dim = len(shape) - 1 if style.split is Split.ROWS or len(shape) == 1 else len(shape) - 2
        cut = Cut(dim, self._segments(name, style, shape[dim], head_dim))
        for segment in cut.segments:
            if segment.length % segment.num_chunks:
                reason = f"{segment.length} features of {name} cannot be shared by {self.size} ranks"
                raise UnsupportedModelError(self.config.model_type, reason, "Choose another tensor_parallel_size")
        return cut

    def _segments(self, name: str, style: Style, length: int, head_dim: int | None) -> tuple[Segment, ...]:
        if self.shares is not None:
            packed = style.num_packed
            return (Segment(length // packed, sum(self.shares), self.shares),) * packed
        if style.packed_heads:
            assert head_dim is not None, "heads are fused in attention modules, and those know their size"
            queries = self.config.num_attention_heads * head_dim
            keys = Segment((length - queries) // 2, min((length - queries) // 2 // head_dim, self.size))
            return Segment(queries, self.size), keys, keys
        is_kv = bool({"k_proj", "v_proj"} & set(name.split("."))) and not style.whole_activations
        if is_kv and style.split is Split.COLUMNS:
            chunks = length // head_dim if head_dim else num_kv_heads(self.config)
            return (Segment(length, min(chunks, self.size)),)
        return (Segment(length // style.num_packed, self.size),) * style.num_packed

    def _check(self) -> None:
        unknown = sorted(set(self._rules.values()) - set(STYLES))
        if unknown:
            reason = f"its tensor-parallel plan has styles that are not understood here ({', '.join(unknown)})"
            raise UnsupportedModelError(self.config.model_type, reason, "Serve it with tensor_parallel_size 1")
        if not any("*" in rule and STYLES[style].split is not Split.WHOLE for rule, style in self._rules.items()):
            reason = "it has no tensor-parallel plan for its layers"
            raise UnsupportedModelError(self.config.model_type, reason, "Serve it with tensor_parallel_size 1")
        if self.splits_attention:
            self.shares = check_heads(self.config, self.size, may_be_uneven=self._may_be_uneven)


def vocabulary_rows(whole: Tensor | Stored, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """One rank's rows of a table over the vocabulary in a dtype, a view where they are of it already; the last rank's
    are filled up with zeros.
    """
    rows: Tensor = share_of_vocabulary(whole, rank, size).to(dtype)
    num_rows = -(-len(whole) // size)
    if len(rows) == num_rows:
        return rows
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def share_of_vocabulary(whole: Tensor | Stored, rank: int, size: int) -> Any:
    """One rank's rows of a table over the vocabulary, a view. Of the last rank, stored ones have zeros behind."""
    num_rows = -(-len(whole) // size)
    rows = whole[rank * num_rows : (rank + 1) * num_rows]
    return rows if isinstance(rows, Tensor) else rows.filled_up(num_rows)


def is_transposed_linear(module: object) -> bool:
    """GPT-2 keeps the weights of its linears as [input, output]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def _complete(config: Any, rules: Mapping[str, str]) -> dict[str, str]:
    """The model's own rules under ours. Where each head has its own norm, attention is split by weights only."""
    completed = {**rules, **_OVERRIDES.get(config.model_type, {})}
    if getattr(config, "moe_latent_size", None):
        completed |= _LATENT_EXPERTS
    normed = getattr(config, _NORMED_HEADS.get(config.model_type, ""), False)
    if not normed:
        return completed
    return {rule: _GATHERED.get(style, style) if ".self_attn." in rule else style for rule, style in completed.items()}


def _generic(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`, as plans write it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
