"""Reference executor: runs a decoder layout in plain torch on one sequence, without pages;
the oracle for the others.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.executors.coded import CodedMatrix
from holdfast.worker.executors.layout import (
    Attention,
    Beside,
    DecoderLayout,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Mlp,
    kv_source,
)
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.mapped_files import MappedFiles, discard_contents
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2, ShortConv
from holdfast.worker.executors.stored_matrix import StoredMatrix, for_all
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models.reference_functions import (
    activated,
    convolved,
    delta_parts,
    delta_rule,
    gated,
    placed,
    product,
    rotated,
    rounded_in_units,
    routing,
    rows_of_table,
    softcapped,
    stays,
    unseen,
)

CONVERTED_AT_A_TIME: Final = 2**18
"""Weights that are converted to float32 together: few enough to stay in a core's cache until they are multiplied."""

GIVEN_BACK_FROM: Final = 2**20
"""Bytes of a weight whose pages are given back once it has been used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """State that layers of one sequence share beside the residual stream."""

    positions: Tensor
    """[T]"""
    inputs: Tensor | None
    """[T, layers, dim]: inputs of the layers' own."""
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by the layer that made them."""


class Reference:
    """One rank's share of a model, ready to run. All ranks of the group make the same calls."""

    def __init__(
        self,
        layout: DecoderLayout,
        group: TensorParallelGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        rounds: bool = False,
        files: MappedFiles | None = None,
    ) -> None:
        """Computes in `dtype`. With `rounds`, values are rounded to the layout's dtype where executors round them. The
        pages of large weights in `files` are given back once they are used.
        """
        self._layout = layout
        self._group = group or SingleRank()
        self._dtype = dtype
        self._files = files
        self._rounded_to = layout.dtype if rounds else None

    def run_model(self, token_ids: Tensor, positions: Tensor | None = None, second_start: int = 0) -> Tensor:
        """Token ids [T] of one sequence -> logits [T, vocab]. `positions` [T] are 0, 1, ... unless given. The second of
        two texts begins at `second_start`; 0: there is one.
        """
        layout, positions = self._layout, torch.arange(len(token_ids)) if positions is None else positions
        x = placed(layout.places, self._embed(token_ids), positions, second_start)
        carried = _Carried(positions=positions, inputs=self._inputs(token_ids, x))
        for index in range(len(layout.layers)):
            x = self._run_layer(index, x, carried)
        logits = self._linear(layout.head, self._norm(layout.norm, x))
        logits = self._group.all_gather(logits)[:, : layout.vocab_size] * layout.logit_scale
        return logits if layout.logit_softcap is None else softcapped(logits, layout.logit_softcap)

    def run_layer(self, index: int, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The residual stream [T, hidden] of one sequence, after layer `index`. Per-layer inputs are those of token 0
        where x enters the first layer; shared keys and values are computed from x.
        """
        positions = torch.arange(len(x)) if positions is None else positions
        x = x.to(self._dtype)
        token_ids = torch.zeros(len(x), dtype=torch.long)
        carried = _Carried(positions=positions, inputs=self._inputs(token_ids, x))
        if (source := kv_source(self._layout.layers[index])) is not None:
            self._run_layer(source, x, carried)
        return self._run_layer(index, x, carried)

    def _run_layer(self, index: int, x: Tensor, carried: "_Carried") -> Tensor:
        layer = self._layout.layers[index]
        y = self._norm(layer.attention_norm, x)
        x = y if stays(layer.attention_norm) else x
        mixed = self._out(layer, layer.attention_out_norm, self._mix(index, y, carried))
        if layer.mlp is None:
            return x + mixed
        if layer.parallel:
            own = layer.attention_norm if layer.mlp_norm is None else layer.mlp_norm
            return x + mixed + self._out(layer, layer.mlp_out_norm, self._feed(layer.mlp, self._norm(own, x)))
        x = x + mixed
        y = self._norm(layer.mlp_norm, x)
        x = y if stays(layer.mlp_norm) else x
        y = self._feed(layer.mlp, y)
        if layer.beside is not None:
            y = self._norm(layer.beside.mlp_out_norm, y) + self._beside(layer.beside, x)
        x = x + self._out(layer, layer.mlp_out_norm, y)
        if layer.input is not None:
            assert carried.inputs is not None, "layers with per-layer inputs have some"
            x = x + self._input(layer.input, x, carried.inputs[:, index])
        return x * layer.output_scale

    def _inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Inputs of the layers' own [T, layers, dim], if they have some; x [T, hidden] enters the first layer."""
        inputs = self._layout.inputs
        if inputs is None:
            return None
        shape = len(x), len(self._layout.layers), inputs.dim
        context = self._norm(inputs.norm, (self._linear(inputs.context, x) * inputs.context_scale).view(shape))
        rows = rows_of_table(inputs.table, token_ids, self._layout.dtype).to(self._dtype).view(shape)
        return (context + rows * inputs.table_scale) * inputs.scale

    def _input(self, own: LayerInput, x: Tensor, inputs: Tensor) -> Tensor:
        """x [T, hidden], inputs [T, dim]: the additions to x."""
        gated = activated(own.activation, self._linear(own.gate, x)) * inputs
        return self._norm(own.norm, self._linear(own.projection, gated))

    def _beside(self, beside: Beside, x: Tensor) -> Tensor:
        routed = self._norm(beside.router_norm, x)
        return self._norm(beside.out_norm, self._mixture(beside.experts, self._norm(beside.norm, x), routed))

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self._layout.embedding
        rows = token_ids - self._group.rank * len(table)
        elsewhere = (rows < 0) | (rows >= len(table))
        rows = rows.masked_fill(elsewhere, 0)
        x = rows_of_table(self._layout.head if table.is_meta else table, rows, table.dtype)
        x = x.masked_fill(elsewhere[:, None], 0)
        return self._group.all_reduce(x.to(self._dtype)) * self._layout.embedding_scale

    def _out(self, layer: Layer, norm: Norm | None, y: Tensor) -> Tensor:
        return self._norm(norm, y) * layer.residual_scale

    def _norm(self, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(self._dtype)
        return y if norm.bias is None else y + norm.bias.to(self._dtype)

    def _mix(self, index: int, x: Tensor, carried: "_Carried") -> Tensor:
        """Attention over the normed rows [T, hidden], or the module in its place; zeros if there is neither."""
        state, attention = self._layout.layers[index].state, self._layout.layers[index].attention
        if isinstance(state, ShortConv):
            return self._convolve(state, x)
        if isinstance(state, GatedDeltaNet):
            return self._recur(state, x)
        parts = [] if attention is None else [self._attended(index, attention, x, carried)]
        parts += [] if state is None else [self._scan(state, x)]
        last = state if attention is None else attention
        if last is None or last.output is None:
            return torch.zeros_like(x)
        slices = [part.view(len(x), last.num_slices, -1) for part in parts]
        return self._row_parallel(last.output, torch.cat(slices, -1).flatten(1))

    def _attended(self, index: int, attention: Attention | LatentAttention, x: Tensor, carried: "_Carried") -> Tensor:
        """Input of attention's output projection."""
        if isinstance(attention, LatentAttention):
            return self._attend_latents(attention, x, carried.positions)
        return self._attend(index, attention, x, carried)

    def _attend_latents(self, attention: LatentAttention, x: Tensor, positions: Tensor) -> Tensor:
        """Latent attention over the normed rows [T, hidden]."""
        heads, latent, rope = attention.num_heads, attention.latent_dim, attention.rope_dim
        parts = [attention.query_outputs, latent, rope]
        q, c, r = torch.split(self._linear(attention.inputs, x), parts, -1)
        if attention.queries is not None:
            q = self._linear(attention.queries, self._norm(attention.query_norm, q))
        plain, p = torch.split(q.view(len(x), heads, -1), [attention.plain_dim, rope], -1)
        r = r[:, None]
        if attention.rotary is not None:
            p, r = (rotated(one, self._layout.rotaries[attention.rotary], positions) for one in (p, r))
        c = self._round(self._norm(attention.latent_norm, c))
        absorbed = self._of_heads(attention.absorb, plain)
        scores = torch.einsum("qhd,kd->hqk", self._round(absorbed), c)
        scores = (scores + torch.einsum("qhd,kd->hqk", self._round(p), self._round(r)[:, 0])) * attention.scaling
        hidden = positions[:, None] < positions
        weights = self._round(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        weighed = torch.einsum("hqk,kd->qhd", weights, c)
        return self._of_heads(attention.expand, weighed).flatten(1)

    def _of_heads(self, linear: Linear, x: Tensor) -> Tensor:
        """x [T, heads, in], each head by its part of the linear -> [T, heads, out]."""
        parts = enumerate(linear.weights)
        return torch.stack([self._linear(Linear(weights=(weight,)), x[:, head]) for head, weight in parts], 1)

    def _scan(self, net: Mamba2, x: Tensor) -> Tensor:
        """Mamba2 over [T, hidden] of one sequence from its first position on: [T, heads * head_dim]."""
        keys, values = net.num_groups * net.state_dim, net.num_heads * net.head_dim
        mixed, z, dt = torch.split(self._linear(net.inputs, x), [net.num_channels, values, net.num_heads], -1)
        c, b, x = torch.split(F.silu(self._convolved(net, mixed)), [keys, keys, values], -1)
        c, b = (part.reshape(len(x), net.num_groups, net.state_dim) for part in (c, b))
        c, b = (part.repeat_interleave(net.num_heads // net.num_groups, 1) for part in (c, b))
        time = F.softplus(dt * net.dt_scale + net.dt_bias.to(self._dtype)).clamp(*net.time_bounds)
        decay = (-net.a_log.to(self._dtype).exp() * time).exp()
        x = x.reshape(len(x), net.num_heads, net.head_dim)
        y = delta_rule(c, b, x, decay, time, recalls=False) + net.skip.to(self._dtype)[:, None] * x
        return self._normed_groups(net, y * F.silu(z.reshape(y.shape) * net.z_scale))

    def _normed_groups(self, net: Mamba2, y: Tensor) -> Tensor:
        """y [T, heads, head_dim], normed by groups that may have heads of other ranks."""
        weight = net.norm.weight.to(self._dtype)
        if not net.norm_heads:
            return y.flatten(1) * weight
        first = self._group.rank * net.num_heads
        groups = (torch.arange(net.num_heads) + first) // net.norm_heads
        squares = y.new_zeros(len(y), net.norm_groups).index_add_(1, groups, y.square().sum(-1))
        if net.norm_heads > net.num_heads:
            squares = self._group.all_reduce(squares)
        factors = torch.rsqrt(squares / (net.norm_heads * net.head_dim) + net.norm.eps)
        return (y * factors[:, groups, None]).flatten(1) * weight

    def _convolved(self, net: GatedDeltaNet | Mamba2, x: Tensor) -> Tensor:
        """The causal convolution of [T, channels]."""
        return convolved(x, net.kernel, net.conv_bias if isinstance(net, Mamba2) else None)

    def _recur(self, net: GatedDeltaNet, x: Tensor) -> Tensor:
        """Gated DeltaNet over [T, hidden] of one sequence from its first position on."""
        keys, values = net.num_key_heads * net.key_dim, net.num_value_heads * net.value_dim
        projected = torch.cat([self._linear(one, x) for one in (net.inputs, net.rates) if one is not None], -1)
        if net.gates is None:
            mixed, z, b, a = torch.split(projected, delta_parts(net), -1)
        else:
            mixed, b, rest = torch.split(projected, delta_parts(net), -1)
            gates = self._linear(net.gates, rest)
            a, z = gates[:, :-values], gates[:, -values:]
        q, k, v = torch.split(F.silu(self._convolved(net, mixed)), [keys, keys, values], -1)
        q, k = (part.reshape(len(x), net.num_key_heads, net.key_dim) for part in (q, k))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        group = net.num_value_heads // net.num_key_heads
        q, k = (part.repeat_interleave(group, 1) for part in (q / net.key_dim**0.5, k))
        strength = F.softplus(a.reshape(len(x), *net.dt_bias.shape) + net.dt_bias.to(self._dtype))
        log = net.a_log if net.gates is None else net.a_log[:, None]
        decay = (-log.to(self._dtype).exp() * strength).exp()
        v = v.reshape(len(x), net.num_value_heads, net.value_dim)
        gate = (F.silu if net.gates is None else torch.sigmoid)(z.reshape(v.shape))
        return self._row_parallel(
            net.output, (self._norm(net.norm, delta_rule(q, k, v, decay, b.sigmoid())) * gate).flatten(1)
        )

    def _convolve(self, conv: ShortConv, x: Tensor) -> Tensor:
        """The short convolution over [T, hidden] of one sequence from its first position on."""
        b, c, x = self._linear(conv.inputs, x).chunk(3, -1)
        return self._row_parallel(conv.output, c * convolved(b * x, conv.kernel, conv.bias))

    def _attend(self, index: int, attention: Attention, x: Tensor, carried: "_Carried") -> Tensor:
        """Attention over the normed rows [T, hidden]: [T, heads * head_dim]."""
        heads, size, positions = attention.num_heads, attention.head_dim, carried.positions
        gates = heads if attention.has_gate else 0
        kv_heads = attention.num_kv_heads if attention.kv_source is None else 0
        parts = [count * size for count in (heads, gates, kv_heads, kv_heads)]
        q, gate, k, v = torch.split(self._linear(attention.qkv, x), parts, -1)
        q = self._heads(q, attention.query_norm, attention, positions)
        if attention.query_scale is not None:
            q = q * attention.query_scale.factors(int(positions.max()) + 1)[positions, None, None]
        q = self._round(q)
        if attention.kv_source is None:
            carried.kept[index] = self._keys_and_values(attention, k, v, positions)
        k, v = carried.kept[index if attention.kv_source is None else attention.kv_source]
        mixed = self._weights(attention, q, k, positions) @ v.repeat_interleave(
            heads // attention.num_kv_heads, 1
        ).transpose(0, 1)
        y = mixed.transpose(0, 1).flatten(1)
        return y * gate.sigmoid() if attention.has_gate else y

    def _keys_and_values(self, attention: Attention, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both [T, KV heads, head_dim], as a cache keeps them."""
        k = self._kept(self._round(self._heads(k, attention.key_norm, attention, positions)))
        v = v.view(-1, attention.num_kv_heads, attention.head_dim)
        v = self._norm(attention.value_norm, v) * attention.value_scale
        return k, self._kept(self._round(v))

    def _heads(self, x: Tensor, norm: Norm | None, attention: Attention, positions: Tensor) -> Tensor:
        """Queries or keys [T, heads, head_dim], normed and rotated."""
        is_after = attention.norms_after_rotation
        over_all = norm is not None and norm.weight.shape == x.shape[-1:] and not is_after
        x = self._norm(norm, x) if over_all else x
        x = x.view(len(x), -1, attention.head_dim)
        before, after = (None, norm) if is_after else (norm, None)
        x = x if over_all else self._norm(before, x)
        if attention.rotary is not None:
            x = rotated(x, self._layout.rotaries[attention.rotary], positions)
        return self._norm(after, x)

    def _weights(self, attention: Attention, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        """Weight of each value for each query [heads, T, T]."""
        k = k.repeat_interleave(attention.num_heads // attention.num_kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scaling
        if attention.softcap is not None:
            scores = softcapped(scores, attention.softcap)
        scores = scores.masked_fill(unseen(attention, positions), -torch.inf)
        if attention.sinks is not None:
            sinks = attention.sinks.to(self._dtype)[:, None, None].expand(-1, len(positions), 1)
            return self._round(torch.cat((scores, sinks), -1).softmax(-1)[..., :-1])
        return self._round(scores.softmax(-1))

    def _feed(self, mlp: Mlp | Experts, x: Tensor) -> Tensor:
        return self._mlp(mlp, x) if isinstance(mlp, Mlp) else self._mixture(mlp, x)

    def _mlp(self, mlp: Mlp, x: Tensor) -> Tensor:
        return self._row_parallel(mlp.down, self._activated(mlp, x))

    def _activated(self, mlp: Mlp, x: Tensor) -> Tensor:
        up = self._linear(mlp.up, x)
        if not mlp.has_gate:
            return activated(mlp.activation, up)
        return gated(mlp, *up.chunk(2, -1))

    def _mixture(self, experts: Experts, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """`routed`: the router's input, if it is not the experts' input."""
        chosen, weights = routing(experts, self._linear(experts.router, x if routed is None else routed))
        rows = x if experts.latent is None else self._linear(experts.latent, x)
        total = torch.zeros(len(x), experts.experts[0].down.out_features, dtype=x.dtype)
        for number, expert in enumerate(experts.experts):
            tokens, slots = torch.where(chosen == number)
            partial = self._linear(expert.down, self._activated(expert, rows[tokens]))
            total.index_add_(0, tokens, partial * weights[tokens, slots, None])
        if experts.latent is not None:
            return self._from_latent(experts, x, total)
        total = self._group.all_reduce(total)
        if experts.shared is None:
            return total
        shared = self._mlp(experts.shared, x)
        if experts.shared_gate is not None:
            shared = shared * torch.sigmoid(self._linear(experts.shared_gate, x))
        return total + shared

    def _from_latent(self, experts: Experts, x: Tensor, total: Tensor) -> Tensor:
        """Hidden rows of the experts' sum, and of what all rows go through."""
        assert experts.shared is not None, "whose output takes the experts' sum"
        parts = (total, self._activated(experts.shared, x))
        slices = torch.cat([part.view(len(x), experts.shared.num_slices, -1) for part in parts], -1)
        return self._row_parallel(experts.shared.down, slices.flatten(1))

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        x = self._round(x)
        if linear.units and self._rounded_to is not None:
            x = rounded_in_units(x)
        y = torch.cat([self._product(x, weight, is_rounded=bool(linear.codes)) for weight in linear.parts], -1)
        return y if linear.bias is None else y + linear.bias.to(self._dtype)

    def _product(self, x: Tensor, weight: Tensor | StoredMatrix | CodedMatrix, *, is_rounded: bool) -> Tensor:
        """`is_rounded`: of stored matrices' numbers, those of the serving dtype count."""
        assert not isinstance(weight, CodedMatrix), "which lies on a device"
        rows = max(1, CONVERTED_AT_A_TIME // weight.shape[1])
        if isinstance(weight, StoredMatrix):
            dtype = self._layout.dtype if is_rounded else x.dtype
            parts: dict[int, Tensor] = {}

            def multiply(first: int) -> None:
                parts[first] = F.linear(x, weight[first : first + rows].copied(dtype).to(x.dtype))

            for_all(multiply, starts := range(0, len(weight), rows))
            if weight.can_be_read_again:
                discard_contents(weight.mapped)
            return torch.cat([parts[first] for first in starts], -1)
        y = product(x, weight, None, rows)
        if self._files is not None and weight.nbytes >= GIVEN_BACK_FROM:
            self._files.give_back(weight)
        return y

    def _row_parallel(self, linear: Linear, x: Tensor) -> Tensor:
        y = self._group.all_reduce(self._linear(replace(linear, bias=None), x))
        return y if linear.bias is None else y + linear.bias.to(self._dtype)

    def _kept(self, x: Tensor) -> Tensor:
        """Keys or values [T, heads, head_dim] as a cache keeps them."""
        return x

    def _round(self, x: Tensor) -> Tensor:
        return x if self._rounded_to is None else x.to(self._rounded_to).to(self._dtype)
