"""Decoder layout of a stated family, straight from config.json and the tensors of its safetensors files: what
`recognize.py` reads from Hugging Face's modules, without building them. The tests prove that both give the same bits.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig, Quantization
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.executors.layout import Activation, Attention, DecoderLayout, Layer, Linear, Mlp, Norm, ShortConv
from holdfast.worker.executors.slices import slices_of_rank
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.units import UNIT
from holdfast.worker.models.checks import check_heads
from holdfast.worker.models.compact import compact_tensors
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.model import serving_dtype
from holdfast.worker.models.model_facts import ModelFacts, facts_of
from holdfast.worker.models.parallel_plan import (
    ATTENTION_AND_MLP,
    ParallelPlan,
    Segment,
    share_of_vocabulary,
    vocabulary_rows,
)
from holdfast.worker.models.quantized_activations import asks_for_units
from holdfast.worker.models.quantizing_tensors import PlainWeight
from holdfast.worker.models.read import OFFSETS
from holdfast.worker.models.rotary import make_rotary
from holdfast.worker.models.safetensors_files import mapped_tensors
from holdfast.worker.models.safetensors_header import INDEX
from holdfast.worker.models.stated_config import STATED, NotStated, read_stated_config
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weights import read_json

_CPU: Final = torch.device("cpu")
_ONE_FILE: Final = "model.safetensors"
_ACTIVATIONS: Final = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU_TANH,  # of gemma alone, whose first configs mean the approximation
}

Weight = Tensor | StoredMatrix
"""A checkpoint's tensor, a view of a mapped file: its numbers, or what they are made of."""


class StoredTensors:
    """The tensors of a checkpoint: numbers, or codes that are numbers once they are asked for. Each is taken once."""

    def __init__(self, folder: Path, dtype: torch.dtype, quantization: Quantization | None) -> None:
        """Raises `NotStated` unless all are of this dtype, in the files that Hugging Face would read; those of a
        compact checkpoint, or one that is quantized now, are of any.
        """
        self._compact = compact_tensors(folder, quantization)
        self._tensors = {} if self._compact is not None else _tensors_of(folder, dtype)

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        tensor = self._tensors.pop(name, None) if self._compact is None else self._compact.take(name, shape)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {shape}"
            raise NotStated(f"the tensor {name} {found}")
        return cast(Weight, tensor)

    def check_all_taken(self) -> None:
        left = set(self._tensors) if self._compact is None else self._compact.left
        if left:
            raise NotStated(f"the checkpoint has {len(left)} more tensors, such as {min(left)}")


def _tensors_of(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    if (folder / INDEX).is_file() == (folder / _ONE_FILE).is_file():
        raise NotStated(f"its folder must have exactly one of {_ONE_FILE} and {INDEX}")
    tensors = {name: tensor.values for name, tensor in mapped_tensors(folder).items()}
    other = next((name for name, values in tensors.items() if values.dtype != dtype), None)
    if other is not None:
        raise NotStated(f"{other} is stored in another type than config.json says: {tensors[other].dtype}")
    return tensors


def read_stated(
    config: ModelConfig, folder: Path, group: TensorParallelGroup, device: torch.device = _CPU
) -> tuple[DecoderLayout, ModelFacts] | str:
    """This rank's share of the checkpoint in `folder`, and what is known of its model; or why Hugging Face's modules
    must be built for it, where an error shows too. On CPUs shares of ranks may be unequal.
    """
    if config.hf_overrides:
        return "model.hf_overrides change its config"
    try:
        raw = served_config(read_json(folder / "config.json"), folder)
        stated = read_stated_config({**raw, **config.config_changes})
        facts = facts_of(stated, folder, config.max_model_len)
        if device.type != "cpu":
            check_heads(stated, group.size)
        layout = stated_layout(
            stated,
            folder,
            group,
            serving_dtype(config, stated),
            config.quantization,
            in_units=asks_for_units(config, device.type),
        )
        return layout, facts
    except (NotStated, ConfigurationError, UnsupportedModelError) as reason:
        return str(reason)


def stated_layout(
    config: Any,
    folder: Path,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    *,
    in_units: bool = False,
) -> DecoderLayout:
    """This rank's share, to be served in `dtype`, and quantized now where `quantization` says so, of the checkpoint in
    `folder`, whose config was read by `stated_config.py`. `in_units`: quantized weights stay so where they are units.

    Raises `NotStated`, and `UnsupportedModelError` where so many ranks cannot share the model.
    """
    stored = StoredTensors(folder, config.dtype, quantization)
    layout = _Builder(config, stored, group, dtype, in_units).layout()
    stored.check_all_taken()
    return layout


class _Builder:
    """Builds one rank's share."""

    def __init__(
        self, config: Any, stored: StoredTensors, group: TensorParallelGroup, dtype: torch.dtype, in_units: bool
    ) -> None:
        self._config = config
        self._stored = stored
        self._rank, self._size = group.rank, group.size
        self._dtype = dtype
        self._in_units = in_units
        self._family = FAMILIES[config.model_type]
        self._stated = STATED[config.model_type]
        self._plan = ParallelPlan(config, ATTENTION_AND_MLP, group.size, may_be_uneven=True)

    def layout(self) -> DecoderLayout:
        config, family = self._config, self._family
        shape = (config.vocab_size, config.hidden_size)
        table = self._stored.take("model.embed_tokens.weight", shape)
        whole_head = table if config.tie_word_embeddings else self._stored.take("lm_head.weight", shape)
        head = self._head(whole_head)
        embedding = self._embedding(table, head if config.tie_word_embeddings else None)
        return DecoderLayout(
            dtype=self._dtype,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            embedding=embedding,
            embedding_scale=self._embedding_scale() * family.embedding_scale(config),
            rotaries=(make_rotary(config.rope_parameters, config.head_dim, interleaved=family.interleaved),),
            layers=tuple(self._layer(index) for index in range(config.num_hidden_layers)),
            norm=self._norm(f"model.{family.final_norm}", config.hidden_size),
            head=head,
            logit_scale=family.logit_scale(config),
            logit_softcap=None if family.logit_softcap is None else getattr(config, family.logit_softcap),
        )

    def _head(self, whole: Weight) -> Linear:
        share = self._coded(share_of_vocabulary(whole, self._rank, self._size))
        if isinstance(share, StoredMatrix) and self._are_units(share, 1):
            return Linear(units=(share,))
        return Linear(weights=(vocabulary_rows(whole, self._rank, self._size, self._dtype),))

    def _embedding(self, whole: Weight, tied: Linear | None) -> Tensor:
        """The table of this rank's rows; with a head of the same numbers, that one's."""
        if tied is None:
            return vocabulary_rows(whole, self._rank, self._size, self._dtype)
        if tied.units:
            return torch.empty(tied.units[0].shape, dtype=self._dtype, device="meta")
        return tied.weights[0]

    def _coded(self, share: Weight) -> Weight:
        """With its codes chosen, where that is done at load and they may stay."""
        if self._in_units and isinstance(share, PlainWeight):
            return share.quantized().filled_up(len(share))
        return share

    def _are_units(self, share: StoredMatrix, slices: int) -> bool:
        """Whether the executor may multiply it as units: each slice of a sum over its inputs has whole ones."""
        return self._in_units and share.unit_form is not None and share.shape[1] % (slices * UNIT) == 0

    def _embedding_scale(self) -> float:
        if not self._stated.scales_embedding:
            return 1.0
        scale = torch.tensor(self._config.hidden_size**0.5)  # loaded in the checkpoint's dtype, as the weights
        return float(scale.to(self._config.dtype).to(self._dtype).item())

    def _layer(self, index: int) -> Layer:
        family, prefix = self._family, f"model.layers.{index}."
        types = getattr(self._config, "layer_types", None)
        is_conv = types is not None and types[index] == "conv"
        return Layer(
            attention_norm=self._optional_norm(prefix, family.attention_norm),
            attention=None if is_conv else self._attention(index, f"{prefix}{family.attention}."),
            state=self._short_conv(f"{prefix}conv.") if is_conv else None,
            attention_out_norm=self._optional_norm(prefix, family.attention_out_norm),
            mlp_norm=self._optional_norm(prefix, family.mlp_norm),
            mlp=self._mlp(f"{prefix}{family.mlp}."),
            mlp_out_norm=self._optional_norm(prefix, family.mlp_out_norm),
            residual_scale=family.residual_scale(self._config),
        )

    def _attention(self, index: int, prefix: str) -> Attention:
        family, stated, config = self._family, self._stated, self._config
        head_dim, queries = config.head_dim, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * head_dim
        qkv = self._columns(
            {prefix + name: size for name, size in zip(family.qkv, (queries, keys, keys), strict=True)},
            config.hidden_size,
            has_bias=stated.qkv_bias(config),
        )
        num_slices = self._slices(config.num_attention_heads)
        shape = config.hidden_size, queries
        output = self._linear(prefix + family.output, shape, has_bias=stated.output_bias(config), slices=num_slices)
        num_heads = output.in_features // head_dim
        module = _attention_module(config, index)
        return Attention(
            num_heads=num_heads,
            num_kv_heads=(qkv.out_features // head_dim - num_heads) // 2,
            head_dim=head_dim,
            qkv=qkv,
            query_norm=self._norm(prefix + family.query_norm, head_dim) if stated.has_head_norms else None,
            key_norm=self._norm(prefix + family.key_norm, head_dim) if stated.has_head_norms else None,
            rotary=0 if family.rotates(module) else None,
            scaling=stated.scaling(config),
            sliding_window=family.window(module),
            softcap=None if family.softcap is None else getattr(config, family.softcap),
            output=output,
            num_slices=num_slices,
        )

    def _short_conv(self, prefix: str) -> ShortConv:
        config, hidden = self._config, self._config.hidden_size
        has_bias, width, num_slices = config.conv_bias, config.conv_L_cache, self._slices(hidden)
        kernel = self._channels(f"{prefix}conv.weight", (hidden, 1, width)).to(self._dtype).float().squeeze(1)
        return ShortConv(
            num_channels=len(kernel),
            inputs=self._fused_columns(f"{prefix}in_proj", (3 * hidden, hidden), 3, has_bias=has_bias),
            kernel=kernel,
            bias=self._channels(f"{prefix}conv.bias", (hidden,)).to(self._dtype).float() if has_bias else None,
            output=self._linear(f"{prefix}out_proj", (hidden, hidden), has_bias=has_bias, slices=num_slices),
            num_slices=num_slices,
        )

    def _channels(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """This rank's channels of a tensor [channels, ...]."""
        (part,) = self._parts(self._stored.take(name, shape), 1)
        channels: Tensor = part.to(self._dtype)
        return channels

    def _parts(self, whole: Weight, count: int) -> list[Any]:
        """This rank's share of each of so many equal parts that follow each other: views."""
        shares = self._plan.shares
        part = Segment(len(whole) // count, self._size if shares is None else sum(shares), shares)
        first, length = part.of_rank(self._rank, self._size)
        return [whole.narrow(0, number * part.length + first, length) for number in range(count)]

    def _fused_columns(self, name: str, shape: tuple[int, int], count: int, *, has_bias: bool) -> Linear:
        """So many linears of as many outputs, which the checkpoint has as one."""
        parts = [self._coded(part) for part in self._parts(self._stored.take(f"{name}.weight", shape), count)]
        bias = torch.cat(self._parts(self._stored.take(f"{name}.bias", shape[:1]), count)) if has_bias else None
        bias = None if bias is None else bias.to(self._dtype).float()
        units = tuple(part for part in parts if isinstance(part, StoredMatrix) and self._are_units(part, 1))
        if len(units) == count:
            return Linear(units=units, bias=bias)
        return Linear(weights=tuple(part.to(self._dtype) for part in parts), bias=bias)

    def _mlp(self, prefix: str) -> Mlp:
        family, config = self._family, self._config
        inner, has_bias = config.intermediate_size, self._stated.mlp_bias(config)
        up = self._columns({prefix + name: inner for name in family.gate_up}, config.hidden_size, has_bias=has_bias)
        slices = self._slices(inner)
        down = self._linear(prefix + family.down, (config.hidden_size, inner), has_bias=has_bias, slices=slices)
        return Mlp(
            activation=_ACTIVATIONS[config.hidden_act],
            has_gate=family.has_gate,
            up=up,
            down=down,
            num_slices=slices,
        )

    def _slices(self, length: int) -> int:
        """Of this rank's share of a sum over so many heads, or inputs, of the whole model."""
        config = self._config
        return slices_of_rank(length, config.num_attention_heads, config.num_key_value_heads, self._rank, self._size)

    def _columns(self, outputs: Mapping[str, int], num_inputs: int, *, has_bias: bool) -> Linear:
        """Linears, by name and number of outputs, stacked."""
        parts = [self._linear(name, (size, num_inputs), has_bias=has_bias) for name, size in outputs.items()]
        biases = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        units = tuple(weight for part in parts for weight in part.units)
        if len(units) == len(parts) and len({weight.unit_form for weight in units}) == 1:
            return Linear(units=units, bias=bias)
        return Linear(weights=tuple(weight for part in parts for weight in self._numbers(part)), bias=bias)

    def _numbers(self, linear: Linear) -> tuple[Tensor, ...]:
        """Its weights as numbers: the executor multiplies units of several forms one by one."""
        return linear.weights + tuple(weight.to(self._dtype) for weight in linear.units)

    def _linear(self, name: str, shape: tuple[int, int], *, has_bias: bool, slices: int = 1) -> Linear:
        """`slices`: of this rank's share of a sum over its inputs."""
        share = self._coded(self._share(f"{name}.weight", shape))
        bias = self._share(f"{name}.bias", shape[:1]).to(self._dtype).float() if has_bias else None
        if isinstance(share, StoredMatrix) and self._are_units(share, slices):
            return Linear(units=(share,), bias=bias)
        return Linear(weights=(share.to(self._dtype),), bias=bias)

    def _share(self, name: str, shape: tuple[int, ...]) -> Weight:
        """This rank's share of a tensor, a view."""
        cut = self._plan.cut(name, shape, self._config.head_dim if f".{self._family.attention}." in name else None)
        whole = self._stored.take(name, shape)
        return whole if cut is None else cut.take(whole, self._rank, self._size)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self._norm(prefix + name, self._config.hidden_size)

    def _norm(self, name: str, size: int) -> Norm:
        weight = self._stored.take(f"{name}.weight", (size,)).to(self._dtype).float()
        return Norm(kind="rms", weight=weight + OFFSETS.get(self._family.norm, 0.0), eps=self._config.rms_norm_eps)


def _attention_module(config: Any, index: int) -> Any:
    """What the rules of `families.py` ask of the attention module of a layer."""
    types = getattr(config, "layer_types", None)
    slides = types is None or types[index] == "sliding_attention"
    rotates = getattr(config, "no_rope_layers", None)
    return SimpleNamespace(
        config=config,
        sliding_window=getattr(config, "sliding_window", None) if slides else None,
        use_rope=rotates is None or bool(rotates[index]),
    )
