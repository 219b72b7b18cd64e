"""Packing of a decoder layout: its weights as tiles in one stretch of memory, and the C structures that describe them.
The layout's linears are consumed: their memory is returned as they are packed, so that weights are in memory once.
"""

import ctypes
from collections.abc import Iterable
from ctypes import CDLL
from typing import Any, Final

import torch

from holdfast.worker.executors.adapters import EMBEDDING, HEAD, adaptable, place_of_all
from holdfast.worker.executors.cpu.adapted_outputs import Site, Sites, numbered
from holdfast.worker.executors.cpu.linear_structures import NativeLinear
from holdfast.worker.executors.cpu.model_structures import (
    NativeBeside,
    NativeExperts,
    NativeLatent,
    NativeLayer,
    NativeLayerInput,
    NativeMlp,
    NativeModel,
    NativeRecurrence,
    NativeRotary,
    NativeShortConv,
    NativeTokenInputs,
)
from holdfast.worker.executors.cpu.packed_rows import gate_and_up, in_dtype, padded_places
from holdfast.worker.executors.cpu.part_packing import GROUP, TILE, PartPacker, site_of_table
from holdfast.worker.executors.cpu.states import recurrence_numbers
from holdfast.worker.executors.cpu.tile_memory import Arena, Compactor, FreedWeights, address_of, is_tied, mapped_memory
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.layout import (
    Activation,
    Attention,
    Beside,
    DecoderLayout,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Mlp,
    Rotary,
    TokenInputs,
    kv_source,
)
from holdfast.worker.executors.layout_arithmetic import QueryScale
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2, ShortConv

_ACTIVATIONS: Final = (
    Activation.SILU,
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.RELU,
    Activation.RELU_SQUARED,
    Activation.CLAMPED_SWIGLU,
)
_SCORINGS: Final = ("softmax", "softmax_of_top", "sigmoid")
_EACH_HEAD, _ALL_HEADS, _OWN_WEIGHTS = 0, 1, 2


class PackedModel(PartPacker):
    """One rank's share of a model in the native executor's form. `model` and its arrays live as long as this."""

    _places: dict[int, tuple[int, str]]

    def __init__(
        self,
        layout: DecoderLayout,
        library: CDLL,
        pool: int,
        *,
        max_positions: int,
        uses_up: bool = False,
        compacts: bool = False,
        keeps_codes: bool = False,
        arena: Arena | None = None,
        head: NativeLinear | None = None,
    ) -> None:
        """Packs all weights, on the pool's threads, into `arena`. Rotary tables have room for `max_positions`.
        Raises `NotFiniteError` for a weight with a NaN or an infinity.

        With `uses_up`, the memory of the layout's linears is given back: only what lies in a file can be read again.
        With `compacts`, weights of bfloat16 are kept in 12 bits each (`tile_memory.py`); if it `keeps_codes`, those of
        E4M3 in 8 bits (`code_packing.py`). `head`: packed elsewhere.
        """
        self._spent = FreedWeights(layout) if uses_up else None
        self.dtype = DTYPES[layout.dtype]
        self._number_type = layout.dtype
        self._max_positions = max_positions
        self._scales_of: dict[QueryScale, int] = {}
        self._library = library
        self._pool = pool
        self._kept: list[Any] = []
        places = {place: one for place, one in adaptable(layout).items() if head is None or place != HEAD}
        numbers = numbered(places)
        self._places = {id(one): (1 + numbers[place_of_all(place)], place) for place, one in places.items()}
        self._sites: dict[str, Site] = {}
        self._arena = Arena() if arena is None else arena
        self._itemsize = layout.dtype.itemsize
        is_bfloat16 = layout.dtype == torch.bfloat16
        self._compactor = Compactor(library, pool) if compacts and is_bfloat16 else None
        self._keeps_codes = keeps_codes and is_bfloat16
        self._rotaries = (NativeRotary * max(1, len(layout.rotaries)))(*map(self._rotary, layout.rotaries))
        self.layers = (NativeLayer * len(layout.layers))(*(self._layer(layer) for layer in layout.layers))
        self.model = self._model(layout, head, num_sites=len(numbers) + 1)
        self.sites = Sites({place: self._sites[place] for place in places} | {EMBEDDING: site_of_table(layout)})
        """The linears that adapters may add to, and the embedding."""
        own = (layer.attention for layer in layout.layers if layer.attention and kv_source(layer) is None)
        self._first_kv_heads = [one.first_kv_head if isinstance(one, Attention) else 0 for one in own]
        self._arena.finish()
        self._spent = self._compactor = None

    def _model(self, layout: DecoderLayout, head: NativeLinear | None, *, num_sites: int) -> NativeModel:
        """`num_sites`: of adapters; the embedding is the last one."""
        model = NativeModel(
            layers=self.layers,
            rotaries=self._rotaries,
            embedding=None if is_tied(layout) else self._embedding(layout.embedding),
            norm=self._norm(layout.norm),
            head=self._linear(layout.head) if head is None else head,
            inputs=None if layout.inputs is None else self._token_inputs(layout.inputs, len(layout.layers)),
            embedding_scale=layout.embedding_scale,
            logit_scale=layout.logit_scale,
            logit_softcap=layout.logit_softcap or 0.0,
            num_layers=len(layout.layers),
            num_rotaries=len(layout.rotaries),
            hidden=layout.hidden_size,
            vocab_rows=len(layout.embedding),
            sum_parts=2 if any(layer.beside for layer in layout.layers) else 1,
            num_sites=num_sites,
            embedding_site=num_sites,
        )
        if (places := layout.places) is not None:
            model.positions, model.segments = self._lines(places.positions), self._lines(places.segments)
        if head is not None:
            model.head.site = 0  # its number is that of the other model
        return model

    def attending(self) -> list[NativeLayer]:
        """The layers with their own keys and values."""
        return [layer for layer in self.layers if layer.num_heads and not layer.reads_others]

    @property
    def kv_specs(self) -> list[KVSpec]:
        """Keys and values of each layer that keeps some."""
        return [
            KVSpec(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                key_dim=layer.head_dim,
                value_dim=0 if layer.latent else layer.head_dim,
                sliding_window=None if layer.sees_behind else layer.window or None,
                first_kv_head=first_kv_head,
            )
            for layer, first_kv_head in zip(self.attending(), self._first_kv_heads, strict=True)
        ]

    def put_pages(
        self, addresses: Iterable[int], tables: Iterable[tuple[int, int, bool]], sources: Iterable[int | None]
    ) -> None:
        """Gives each layer its pages: those of a cache at these addresses, with `TiledCache.tables`; or those of the
        layer in `sources`, whose keys and values it reads.
        """
        for layer, address, table in zip(self.attending(), addresses, tables, strict=True):
            layer.pages = address
            layer.block_size, layer.block_bytes, layer.has_own_table = table
        for layer, source in zip(self.layers, sources, strict=True):
            if source is not None:
                of = self.layers[source]
                layer.pages, layer.block_size = of.pages, of.block_size
                layer.block_bytes, layer.has_own_table = of.block_bytes, of.has_own_table

    def _layer(self, layer: Layer) -> NativeLayer:
        mlp, beside = layer.mlp, layer.beside
        experts = mlp if isinstance(mlp, Experts) else None if beside is None else beside.experts
        native = NativeLayer(
            attention_norm=self._norm(layer.attention_norm),
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
            mlp=self._mlp_beside_experts(mlp),
            experts=None if experts is None else self._experts(experts),
            beside=None if beside is None else self._beside(beside),
            residual_scale=layer.residual_scale,
            output_scale=layer.output_scale,
            parallel=int(layer.parallel),
        )
        if isinstance(layer.attention, LatentAttention):
            self._put_latent_attention(native, layer.attention)
        elif layer.attention is not None:
            self._put_attention(native, layer.attention)
        if isinstance(layer.state, ShortConv):
            self._put_short_conv(native, layer.state)
        elif layer.state is not None:
            self._put_recurrence(native, layer.state)
        if layer.input is not None:
            native.input = self._layer_input(layer.input)
        return native

    def _layer_input(self, own: LayerInput) -> Any:
        described = NativeLayerInput(
            gate=self._linear(own.gate),
            projection=self._linear(own.projection),
            norm=self._norm(own.norm),
            activation=_ACTIVATIONS.index(own.activation),
        )
        self._kept.append(described)
        return ctypes.pointer(described)

    def _token_inputs(self, inputs: TokenInputs, num_layers: int) -> Any:
        described = NativeTokenInputs(
            table=None if isinstance(inputs.table, Linear) else self._embedding(inputs.table, is_kept=False),
            coded=self._linear(inputs.table) if isinstance(inputs.table, Linear) else NativeLinear(),
            context=self._linear(inputs.context, rows=padded_places(num_layers * inputs.dim, num_layers, GROUP)),
            norm=self._norm(inputs.norm),
            table_scale=inputs.table_scale,
            context_scale=inputs.context_scale,
            scale=inputs.scale,
            dim=inputs.dim,
        )
        self._kept.append(described)
        return ctypes.pointer(described)

    def _put_attention(self, native: NativeLayer, attention: Attention) -> None:
        native.query_norm = self._norm(attention.query_norm)
        native.key_norm = self._norm(attention.key_norm)
        native.value_norm = self._norm(attention.value_norm)
        native.qkv = self._linear(attention.qkv)
        native.reads_others = int(attention.kv_source is not None)
        native.output = self._linear(attention.output, slices=attention.num_slices)
        native.sinks = None if attention.sinks is None else self._floats(attention.sinks)
        if attention.query_scale is not None:
            native.query_scales = self._query_scales(attention.query_scale)
        native.norms_after_rotation = int(attention.norms_after_rotation)
        native.scaling, native.value_scale = attention.scaling, attention.value_scale
        native.softcap = attention.softcap or 0.0
        native.num_heads = attention.num_heads
        native.has_gate = int(attention.has_gate)
        native.num_kv_heads = attention.num_kv_heads
        native.head_dim = attention.head_dim
        native.heads_per_slice = attention.num_heads // attention.num_slices
        native.window = attention.sliding_window or 0
        native.sees_behind = int(attention.sees_behind)
        native.rotary = -1 if attention.rotary is None else attention.rotary
        native.head_norms = _head_norms(attention.query_norm, attention.head_dim, attention.num_heads)

    def _put_latent_attention(self, native: NativeLayer, attention: LatentAttention) -> None:
        heads, latent, value = attention.num_heads, attention.latent_dim, attention.value_dim
        described = NativeLatent(
            queries=NativeLinear() if attention.queries is None else self._linear(attention.queries),
            absorb=self._linear(attention.absorb, rows=padded_places(heads * latent, heads, GROUP)),
            expand=self._linear(attention.expand, rows=padded_places(heads * value, heads, GROUP)),
            query_norm=self._norm(attention.query_norm),
            latent_norm=self._norm(attention.latent_norm),
            query_outputs=attention.query_outputs,
            plain_dim=attention.plain_dim,
            rope_dim=attention.rope_dim,
            latent_dim=latent,
            value_dim=value,
        )
        self._kept.append(described)
        self._put_head_sites(attention.absorb, described.absorb, latent, attention.plain_dim)
        self._put_head_sites(attention.expand, described.expand, value, latent)
        native.latent = ctypes.pointer(described)
        native.qkv = self._linear(attention.inputs)
        native.output = self._linear(attention.output, slices=attention.num_slices)
        native.scaling = attention.scaling
        native.num_heads, native.num_kv_heads, native.head_dim = heads, 1, attention.key_dim
        native.heads_per_slice = heads // attention.num_slices
        native.rotary = -1 if attention.rotary is None else attention.rotary

    def _put_short_conv(self, native: NativeLayer, conv: ShortConv) -> None:
        """But for `columns`, which the states' memory decides."""
        described = NativeShortConv(
            inputs=self._linear(conv.inputs),
            kernel=self._lines(conv.kernel.T),
            bias=None if conv.bias is None else self._floats(conv.bias),
            channels=conv.num_channels,
            width=conv.width,
        )
        self._kept.append(described)
        native.conv = ctypes.pointer(described)
        native.output = self._linear(conv.output, slices=conv.num_slices)

    def _put_recurrence(self, native: NativeLayer, net: GatedDeltaNet | Mamba2) -> None:
        """But for `columns`, which the states' memory decides."""
        mamba = net if isinstance(net, Mamba2) else None
        gates, rates = (net.gates, net.rates) if isinstance(net, GatedDeltaNet) else (None, None)
        described = NativeRecurrence(
            inputs=self._linear(net.inputs),
            rates=NativeLinear() if rates is None else self._linear(rates),
            gates=NativeLinear() if gates is None else self._linear(gates),
            kernel=self._lines(net.kernel.T),
            conv_bias=None if mamba is None or mamba.conv_bias is None else self._floats(mamba.conv_bias),
            a_log=self._floats(net.a_log),
            dt_bias=self._floats(net.dt_bias),
            skip=None if mamba is None else self._floats(mamba.skip),
            norm=self._norm(net.norm),
            **recurrence_numbers(net),
        )
        self._kept.append(described)
        native.recurrence = ctypes.pointer(described)
        if net.output is not None:
            native.output = self._linear(net.output, slices=net.num_slices)

    def _mlp_beside_experts(self, mlp: Mlp | Experts | None) -> NativeMlp:
        """The MLP of a layer; of experts with latent rows the one that all rows go through."""
        if isinstance(mlp, Experts) and mlp.latent is not None:
            assert mlp.shared is not None, "whose output takes the experts' sum"
            return self._mlp(mlp.shared, mlp.experts[0].down.out_features)
        return self._mlp(mlp) if isinstance(mlp, Mlp) else NativeMlp()

    def _mlp(self, mlp: Mlp, before: int = 0) -> NativeMlp:
        """`before`: inputs of `down` that are not its own, the first ones of each slice."""
        inner = mlp.down.in_features - before
        places = padded_places(inner, mlp.num_slices, TILE, before // mlp.num_slices)
        rows = gate_and_up(places, inner, TILE) if mlp.has_gate else places
        return NativeMlp(
            up=self._linear(mlp.up, rows=rows),
            down=self._linear(mlp.down, slices=mlp.num_slices),
            gate_scale=mlp.gate_scale,
            inner_scale=mlp.inner_scale,
            activation=_ACTIVATIONS.index(mlp.activation),
            has_gate=int(mlp.has_gate),
        )

    def _experts(self, experts: Experts) -> Any:
        packed = (NativeMlp * len(experts.experts))(*map(self._mlp, experts.experts))
        latent = None if experts.latent is None else self._linear(experts.latent)
        shared = None if experts.shared is None or latent is not None else self._mlp(experts.shared)
        gate = None if experts.shared_gate is None else self._linear(experts.shared_gate)
        described = NativeExperts(
            router=self._router(experts.router),
            experts=packed,
            shared=None if shared is None else ctypes.pointer(shared),
            shared_gate=None if gate is None else ctypes.pointer(gate),
            latent=None if latent is None else ctypes.pointer(latent),
            num_experts=len(experts.experts),
            top_k=experts.top_k,
            scoring=_SCORINGS.index(experts.scoring),
            normalized=int(experts.normalized),
            selection_bias=None if experts.selection_bias is None else self._floats(experts.selection_bias),
            least_sum=experts.least_sum,
            scales=None if experts.scales is None else self._floats(experts.scales),
            num_groups=experts.num_groups,
            top_groups=experts.top_groups,
            group_best=experts.group_best,
        )
        self._kept += [packed, shared, gate, latent, described]
        return ctypes.pointer(described)

    def _router(self, router: Linear) -> NativeLinear:
        """A router; one in float32 becomes several linears that are added (`in_dtype`), adapters to the first."""
        parts = in_dtype(router, self._number_type)
        place = self._places[id(parts)] = self._places[id(router)]
        packed = self._linear(parts)
        if parts is not router:
            del self._places[id(parts)]
            self._sites[place[1]] = self._sites[place[1]].of_first(router.out_features)
        return packed

    def _beside(self, beside: Beside) -> Any:
        norms = NativeBeside(
            norm=self._norm(beside.norm),
            router_norm=self._norm(beside.router_norm),
            out_norm=self._norm(beside.out_norm),
            mlp_out_norm=self._norm(beside.mlp_out_norm),
        )
        self._kept.append(norms)
        return ctypes.pointer(norms)

    def _query_scales(self, scale: QueryScale) -> int:
        if scale not in self._scales_of:
            self._scales_of[scale] = self._floats(scale.factors(self._max_positions))
        return self._scales_of[scale]

    def _rotary(self, rotary: Rotary) -> NativeRotary:
        pairs = len(rotary.inverse_frequencies)
        table = mapped_memory(self._max_positions * 2 * pairs * 4)
        self._kept.append(table)
        return NativeRotary(
            inverse_frequencies=self._floats(rotary.inverse_frequencies),
            table=address_of(table),
            scaling=rotary.scaling,
            pairs=pairs,
            interleaved=int(rotary.interleaved),
        )


def _head_norms(norm: Norm | None, head_dim: int, num_heads: int) -> int:
    if norm is None or norm.weight.numel() == head_dim:
        return _EACH_HEAD
    return _OWN_WEIGHTS if norm.weight.dim() == 2 else _ALL_HEADS
