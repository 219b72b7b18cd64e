"""Gated DeltaNet layers of stated families, as parts of a decoder layout."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet
from holdfast.worker.models.family import DeltaPacking
from holdfast.worker.models.rank_share import Outputs, RankShare
from holdfast.worker.models.stated_config import NotStated

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
        return GatedDeltaNet(
            num_key_heads=self._key_heads // share.size,
            num_value_heads=self._value_heads // share.size,
            key_dim=self._key_dim,
            value_dim=self._value_dim,
            inputs=self._inputs(prefix),
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

    def _inputs(self, prefix: str) -> Linear:
        if self._packing is DeltaPacking.BY_KIND:
            qkv = self._columns(f"{prefix}in_proj_qkv", [(self._keys, None)] * 2 + [(self._values, None)])
            of_z = self._columns(f"{prefix}in_proj_z", [(self._values, None)])
            of_b, of_a = (self._columns(f"{prefix}in_proj_{one}", [(self._value_heads, None)]) for one in "ba")
            return _stacked([qkv, of_b, of_a, of_z])
        qkvz = self._columns(f"{prefix}in_proj_qkvz", [(2 * (self._keys + self._values), None)])
        ba = self._columns(f"{prefix}in_proj_ba", [(2 * self._value_heads, None)])
        group = self._value_heads // self._key_heads
        q, k, v, z = _by_head(qkvz, [self._key_dim] * 2 + [group * self._value_dim] * 2)
        b, a = _by_head(ba, [group] * 2)
        return Linear(weights=(*q, *k, *v, *b, *a, *z))

    def _columns(self, name: str, outputs: Outputs) -> Linear:
        hidden = self._share.config.hidden_size
        return self._share.columns([name], outputs, hidden, has_bias=False, may_stay=False)

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
        """Numbers as they are stored: what is rounded here would change every decay."""
        return self._share.vector(name, (self._value_heads,)).narrow(0, *self._share.part(self._value_heads))


def _stacked(linears: Sequence[Linear]) -> Linear:
    return Linear(weights=tuple(weight for linear in linears for weight in linear.weights))


def _by_head(linear: Linear, lengths: Sequence[int]) -> list[list[Tensor]]:
    """Views by part, of outputs that are those of one key head after the other, in parts of these lengths."""
    (weight,) = linear.weights
    pieces = torch.split(weight, [*lengths] * (len(weight) // sum(lengths)))
    return [list(pieces[part :: len(lengths)]) for part in range(len(lengths))]
