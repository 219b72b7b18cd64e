"""Layers of stated families that keep a state, Gated DeltaNet and Mamba2, as parts of a decoder layout."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.layout import Attention
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2
from holdfast.worker.models.family import DeltaPacking, Mamba, is_set
from holdfast.worker.models.rank_share import Outputs, RankShare, joined
from holdfast.worker.models.stated_config import NotStated
from holdfast.worker.models.stated_tensors import Weight

_MAX_GROUPS = 1024
"""Most groups that are normed apart on one rank (`cpu/native/step.h`)."""


class MambaBuilder:
    """Builds them. Ranks share heads, and groups: of fewer groups than ranks, neighbours have the same."""

    def __init__(self, share: RankShare, mamba: Mamba) -> None:
        """Raises `NotStated` for sizes no layout can say, `UnsupportedModelError` where ranks cannot share them."""
        config = share.config
        self._share, self._mamba = share, mamba
        self._heads, self._head_dim = getattr(config, mamba.num_heads), getattr(config, mamba.head_dim)
        self._groups, self._states = getattr(config, mamba.num_groups), getattr(config, mamba.state_dim)
        self._width, self._scales = getattr(config, mamba.width), mamba.scales(config)
        self._values, self._keys = self._heads * self._head_dim, self._groups * self._states
        if reason := mamba.refused(config):
            raise NotStated(reason)
        if getattr(config, mamba.activation) not in ("silu", "swish"):
            raise NotStated(f"its {mamba.activation} is {getattr(config, mamba.activation)!r} in Mamba2 layers")
        if self._heads % self._groups or self._head_dim % 16 or self._states % 16 or self._groups > _MAX_GROUPS:
            raise NotStated("its Mamba2 heads have sizes that are no multiples of 16, or share groups unevenly")
        if self._heads % share.size or (self._groups % share.size and share.size % self._groups):
            reason = f"{self._heads} heads and {self._groups} groups of its Mamba2 layers cannot be shared by "
            raise UnsupportedModelError(
                config.model_type, f"{reason}{share.size} ranks", "Choose another tensor_parallel_size"
            )
        self._slices = share.slices(self._heads)
        of_slice, of_group = self._heads // share.size // self._slices, self._heads // self._groups
        if of_slice % of_group and of_group % of_slice:
            raise NotStated("the groups of its Mamba2 heads do not fit the slices of its sums")

    def build(self, layer: str) -> Mamba2:
        """Mamba2 of the layer whose tensors have names with this prefix."""
        share, config, mamba, scales = self._share, self._share.config, self._mamba, self._scales
        prefix, has_norm = f"{layer}{mamba.module}.", is_set(mamba.has_norm, self._share.config)
        has_bias = is_set(mamba.output_bias, config)
        output = share.rows(f"{prefix}out_proj", (config.hidden_size, self._values), self._slices, has_bias=has_bias)
        if output.bias is not None:
            output = replace(output, bias=output.bias * scales.output)
        return Mamba2(
            num_groups=max(1, self._groups // share.size),
            num_heads=self._heads // share.size,
            state_dim=self._states,
            head_dim=self._head_dim,
            inputs=self._inputs(f"{prefix}in_proj"),
            kernel=self._of_channels(f"{prefix}conv1d.weight", self._width) * self._channel_scales()[:, None],
            conv_bias=self._conv_bias(prefix),
            a_log=self._of_heads(f"{prefix}A_log"),
            dt_bias=self._of_heads(f"{prefix}dt_bias"),
            skip=self._of_heads(f"{prefix}D"),
            dt_scale=scales.input * scales.dt,
            z_scale=scales.input * scales.z,
            time_bounds=mamba.time_bounds(config),
            norm=self._norm(f"{prefix}norm.weight", has_norm=has_norm),
            norm_heads=self._heads // self._groups if has_norm else 0,
            norm_groups=self._groups,
            first_group=share.rank * self._groups // share.size,
            output=output,
            num_slices=self._slices,
        )

    def _inputs(self, name: str) -> Linear:
        """Stored as z, x, B, C, dt. What multiplies the inputs, multiplies no bias: so biases are divided by it."""
        share, values, keys = self._share, (self._values, None), (self._keys, self._groups)
        outputs = [values, values, keys, keys, (self._heads, None)]
        has_bias = is_set(self._mamba.input_bias, share.config)
        hidden, stays = share.config.hidden_size, share.keeps_units
        whole = share.columns([name], outputs, hidden, has_bias=has_bias, may_stay=stays)
        order = (3, 2, 1, 0, 4)
        bias = whole.bias
        if bias is not None:
            parts = torch.split(bias / self._scales.input, [int(part.shape[0]) for part in whole.parts])
            bias = torch.cat([parts[part] for part in order])
        return Linear(
            weights=tuple(whole.weights[part] for part in order if whole.weights),
            units=tuple(whole.units[part] for part in order if whole.units),
            codes=tuple(whole.codes[part] for part in order if whole.codes),
            bias=bias,
        )

    def _of_channels(self, name: str, width: int) -> Tensor:
        """[channels of this rank, width] in the order of C, B, x; stored as x, B, C."""
        whole = self._share.tensors.take(name, (self._values + 2 * self._keys, 1, width))
        return self._cut(self._share.floats(whole).squeeze(1))

    def _conv_bias(self, prefix: str) -> Tensor | None:
        if not is_set(self._mamba.conv_bias, self._share.config):
            return None
        whole = self._share.tensors.take(f"{prefix}conv1d.bias", (self._values + 2 * self._keys,))
        return self._cut(self._share.floats(whole))

    def _cut(self, whole: Tensor) -> Tensor:
        of_keys, of_values = self._share.part(self._keys, self._groups), self._share.part(self._values)
        x, b, c = torch.split(whole, [self._values, self._keys, self._keys])
        return torch.cat([c.narrow(0, *of_keys), b.narrow(0, *of_keys), x.narrow(0, *of_values)])

    def _channel_scales(self) -> Tensor:
        """Scales of the convolution's inputs; the convolution is linear."""
        scales, parts = self._scales, ((self._values, "x"), (self._keys, "b"), (self._keys, "c"))
        return self._cut(torch.cat([torch.full((n,), scales.input * getattr(scales, one)) for n, one in parts]))

    def _of_heads(self, name: str) -> Tensor:
        """Numbers as stored: rounding here would change every decay."""
        return self._share.vector(name, (self._heads,)).narrow(0, *self._share.part(self._heads))

    def _norm(self, name: str, *, has_norm: bool) -> Norm:
        share = self._share
        weight = share.floats(share.tensors.take(name, (self._values,))) if has_norm else torch.ones(self._values)
        own = weight.narrow(0, *share.part(self._values)) * self._scales.output
        return Norm(kind="rms", weight=own, eps=float(getattr(share.config, share.family.eps)))


def slices_beside(attention: Attention, mamba: Mamba2, dtype: torch.dtype) -> tuple[Attention, Mamba2]:
    """Both with one output, whose inputs are, slice by slice, values of attention and then those of Mamba2."""
    assert mamba.output is not None, "each is built with its own"
    if attention.num_slices != mamba.num_slices:
        raise NotStated("attention and Mamba2 beside each other have other numbers of slices")
    output = joined((attention.output, mamba.output), attention.num_slices, dtype)
    return replace(attention, output=output), replace(mamba, output=None)


LINEAR: Final = "linear_attention"
"""Entry of `layer_types` for these layers."""


class DeltaNetBuilder:
    """Builds them. Ranks share key heads, and with each of them its value heads."""

    def __init__(self, share: RankShare, packing: DeltaPacking) -> None:
        """Raises `NotStated` for sizes no layout can say, `UnsupportedModelError` where ranks cannot share them."""
        config = share.config
        self._share = share
        self._packing = packing
        self._key_heads, self._value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self._key_dim, self._value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._width = config.linear_conv_kernel_dim
        self._keys, self._values = self._key_heads * self._key_dim, self._value_heads * self._value_dim
        if self._value_heads % self._key_heads or self._key_dim % 16 or self._value_dim % 16:
            raise NotStated("its linear heads have sizes that are no multiples of 16, or share key heads unevenly")
        if self._key_heads % share.size:
            reason = f"{self._key_heads} key heads of its linear attention cannot be shared by {share.size} ranks"
            raise UnsupportedModelError(config.model_type, reason, "Choose another tensor_parallel_size")

    def build(self, prefix: str) -> GatedDeltaNet:
        """Gated DeltaNet of the layer whose tensors have names with this prefix."""
        share, config = self._share, self._share.config
        slices = share.slices(self._value_heads)
        output = share.rows(f"{prefix}out_proj", (config.hidden_size, self._values), slices, has_bias=False)
        inputs, rates = self._inputs(prefix)
        return GatedDeltaNet(
            num_key_heads=self._key_heads // share.size,
            num_value_heads=self._value_heads // share.size,
            key_dim=self._key_dim,
            value_dim=self._value_dim,
            inputs=inputs,
            rates=rates,
            kernel=self._kernel(f"{prefix}conv1d.weight"),
            a_log=self._of_value_heads(f"{prefix}A_log"),
            dt_bias=self._of_value_heads(f"{prefix}dt_bias"),
            norm=Norm(
                kind="rms",
                weight=share.floats(share.tensors.take(f"{prefix}norm.weight", (self._value_dim,))),
                eps=config.rms_norm_eps,
            ),
            output=output,
            num_slices=slices,
        )

    def _inputs(self, prefix: str) -> tuple[Linear, Linear | None]:
        """Queries, keys, values and z, then b and a; see `_linears_of`."""
        hidden, values, share = self._share.config.hidden_size, (self._values, None), self._share
        if self._packing is DeltaPacking.BY_KIND:
            qkv = share.shares([f"{prefix}in_proj_qkv"], [(self._keys, None)] * 2 + [values], hidden)
            z = share.shares([f"{prefix}in_proj_z"], [values], hidden)
            of_heads: Outputs = [(self._value_heads, None)] * 2
            rates = share.shares([f"{prefix}in_proj_{one}" for one in "ba"], of_heads, hidden)
            return _linears_of(share, [*qkv, *z], rates, math.gcd(self._key_dim, self._value_dim))
        (qkvz,) = share.shares([f"{prefix}in_proj_qkvz"], [(2 * (self._keys + self._values), None)], hidden)
        (ba,) = share.shares([f"{prefix}in_proj_ba"], [(2 * self._value_heads, None)], hidden)
        group = self._value_heads // self._key_heads
        parts = _by_head(qkvz, [self._key_dim] * 2 + [group * self._value_dim] * 2)
        return _linears_of(share, parts, _by_head(ba, [group] * 2), math.gcd(self._key_dim, self._value_dim))

    def _kernel(self, name: str) -> Tensor:
        """[channels of this rank, width]"""
        share, parts, start = self._share, list[Tensor](), 0
        whole = share.tensors.take(name, (2 * self._keys + self._values, 1, self._width))
        for size in (self._keys, self._keys, self._values):
            first, length = share.part(size)
            parts.append(share.floats(whole.narrow(0, start + first, length)))
            start += size
        return torch.cat(parts).squeeze(1)

    def _of_value_heads(self, name: str) -> Tensor:
        """Numbers as they are stored: rounding here would change every decay."""
        return self._share.vector(name, (self._value_heads,)).narrow(0, *self._share.part(self._value_heads))


class KimiDeltaBuilder:
    """Builds Kimi Delta Attention: equal numbers of key and value heads, a decay for each key, gates of two linears.
    Ranks share heads, and each has the first linears of gates whole.
    """

    def __init__(self, share: RankShare) -> None:
        """Raises `NotStated` for sizes no layout can say, `UnsupportedModelError` where ranks cannot share them."""
        config = share.config
        self._share, self._heads, self._size = share, config.linear_num_heads, config.linear_head_dim
        self._all = self._heads * self._size
        if self._size % 16:
            raise NotStated(f"its linear heads have {self._size} dimensions, no multiple of 16")
        if self._heads % share.size:
            reason = f"{self._heads} heads of its linear attention cannot be shared by {share.size} ranks"
            raise UnsupportedModelError(config.model_type, reason, "Choose another tensor_parallel_size")

    def build(self, prefix: str) -> GatedDeltaNet:
        """Layer whose tensors have names with this prefix."""
        share, config = self._share, self._share.config
        slices = share.slices(self._heads)
        inputs, rates = self._inputs(prefix)
        a_log = share.vector(f"{prefix}A_log", (1, 1, self._heads, 1))
        dt_bias = share.vector(f"{prefix}dt_bias", (self._all,)).narrow(0, *share.part(self._all))
        return GatedDeltaNet(
            num_key_heads=self._heads // share.size,
            num_value_heads=self._heads // share.size,
            key_dim=self._size,
            value_dim=self._size,
            inputs=inputs,
            rates=rates,
            gates=self._gates(prefix),
            kernel=torch.cat([self._kernel(f"{prefix}{one}_conv1d.weight") for one in "qkv"]),
            a_log=a_log.narrow(0, *share.part(self._heads)),
            dt_bias=dt_bias.view(-1, self._size),
            norm=Norm(
                kind="rms",
                weight=share.floats(share.tensors.take(f"{prefix}o_norm.weight", (self._size,))),
                eps=config.rms_norm_eps,
            ),
            output=share.rows(f"{prefix}o_proj", (config.hidden_size, self._all), slices, has_bias=False),
            num_slices=slices,
        )

    def _inputs(self, prefix: str) -> tuple[Linear, Linear | None]:
        """Queries, keys, values, then b and the inputs of both gates; see `_linears_of`."""
        share, hidden, ranks = self._share, self._share.config.hidden_size, [(self._size, 1)] * 2
        qkv = share.shares([f"{prefix}{one}_proj" for one in "qkv"], [(self._all, None)] * 3, hidden)
        outputs: Outputs = [(self._heads, None), *ranks]
        rates = share.shares([f"{prefix}{one}_proj" for one in ("b", "f_a", "g_a")], outputs, hidden)
        return _linears_of(share, qkv, rates, self._size)

    def _gates(self, prefix: str) -> Linear:
        """One linear of both: each has zeros for the inputs of the other."""
        decays, z = (
            self._share.columns(
                [f"{prefix}{one}_proj"], [(self._all, None)], self._size, has_bias=False, may_stay=False
            ).weights[0]
            for one in ("f_b", "g_b")
        )
        none = torch.zeros_like(decays)
        return Linear(weights=(torch.cat((decays, none), 1), torch.cat((none, z), 1)))

    def _kernel(self, name: str) -> Tensor:
        whole = self._share.tensors.take(name, (self._all, 1, self._share.config.linear_conv_kernel_dim))
        return self._share.floats(whole.narrow(0, *self._share.part(self._all))).squeeze(1)


def _linears_of(
    share: RankShare, parts: Sequence[Weight], rates: Sequence[Weight], together: int
) -> tuple[Linear, Linear | None]:
    """One linear of all parts and rates, or, where the parts stay quantized, one of these and one of the rates: files
    have rates in another form, or as numbers. `together`: outputs of a part are a multiple of it on any rank.
    """
    first = share.stacked(parts, may_stay=share.keeps_units, together=together)
    if first.units or first.codes:
        return first, share.stacked(rates, may_stay=share.keeps_units)
    return Linear(weights=(*first.weights, *map(share.numbers, rates))), None


def _by_head(weight: Weight, lengths: Sequence[int]) -> list[Weight]:
    """Views, part after part, of outputs that are those of one key head after the other, in parts of these lengths."""
    starts = [0, *accumulate(lengths)]
    heads = range(0, len(weight), sum(lengths))
    return [
        weight.narrow(0, head + start, length)
        for start, length in zip(starts[:-1], lengths, strict=True)
        for head in heads
    ]
