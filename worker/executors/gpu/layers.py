"""Layers of a decoder on a device: the order in which the kernels run on a step, and the buffers between them."""

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.worker.executors.adapters import HEAD
from holdfast.worker.executors.gpu.adapters import DeviceAdapters
from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.launches import (
    MAX_OUTSIDE_SPLITS,
    Launches,
    SplitSpace,
    StepTensors,
    num_vocab_blocks,
    splits_outside,
)
from holdfast.worker.executors.gpu.mixtures import DeviceMixtures, MixtureLaunches
from holdfast.worker.executors.gpu.rank_exchange import RankExchange
from holdfast.worker.executors.gpu.step_arrays import tile_columns
from holdfast.worker.executors.gpu.weights import DeviceWeights
from holdfast.worker.executors.kv_cache import KVCache, KVSpec, LayerCache
from holdfast.worker.executors.layout import Attention, DecoderLayout, Layer, Mlp, attention_of
from holdfast.worker.executors.linears import Linear, Norm


class DeviceLayers:
    """One rank's layers. All ranks of the group make the same calls."""

    def __init__(
        self,
        weights: DeviceWeights,
        rank: int,
        exchange: RankExchange,
        launches: Launches,
        adapters: DeviceAdapters,
        progress: Tensor,
    ) -> None:
        """`progress` [1], int64, moves with every layer."""
        self._weights = weights
        self._layout: DecoderLayout = weights.layout
        self._rank = rank
        self._exchange = exchange
        self._launches = launches
        self._adapters = adapters
        self._progress = progress
        self.buffers = Buffers(weights.layout.embedding.device)
        self._mixtures = DeviceMixtures(self.buffers, launches, MixtureLaunches(launches.launch))

    def run(self, step: StepTensors, wanted: Tensor, cache: KVCache) -> Tensor:
        """A whole step: the rows of the head's input [wanted, hidden] that are asked for."""
        layout, residual = self._layout, self._residual(step)
        first_id = self._rank * len(layout.embedding)
        self._launches.embed(step.token_ids, layout.embedding, first_id, layout.embedding_scale, residual)
        self._adapters.group(step)
        self._adapters.add_to_embedding(step, first_id, residual)
        self._exchange.add_in_place(residual)  # of one rank alone, and zeros
        out = self.buffers.take("head", (len(wanted), layout.hidden_size), layout.dtype)
        self._begin_layer(0, residual, step)
        for index in range(len(layout.layers)):
            self._layer(index, residual, step, cache, (wanted, out))
        return out

    def run_layer(self, index: int, x: Tensor, step: StepTensors, cache: KVCache) -> Tensor:
        """The residual stream [T, hidden] after one layer."""
        residual = self._residual(step)
        residual.copy_(x)
        self._begin_layer(index, residual, step)
        self._layer(index, residual, step, cache, None)
        return residual

    def warm_up(self) -> None:
        """Compiles what steps of any number of rows use of mixtures of experts."""
        x = self.buffers.take("normed", (1, self._layout.hidden_size), self._layout.dtype)
        for mixture in self._weights.mixtures:
            if mixture is not None:
                self._mixtures.warm_up(mixture, x)

    def logits(self, x: Tensor, step: StepTensors) -> Tensor:
        """x [wanted, hidden] -> this rank's [wanted, rows of the head], float32."""
        layout = self._layout
        out = self.buffers.take("logits", (1, len(x), layout.head.out_features))
        if not self._adapters.adds_to(HEAD, step):
            self._launches.linear(x, layout.head, out, scale=layout.logit_scale, softcap=layout.logit_softcap)
            return out[0]
        self._launches.linear(x, layout.head, out)
        self._adapters.add(HEAD, x, step, out, wanted=True)
        self._launches.cap(out, layout.logit_scale, layout.logit_softcap)
        return out[0]

    def find_best(self, logits: Tensor) -> None:
        """Each row's argmax over all ranks, of whose blocks alone something travels."""
        take, num_wanted = self.buffers.take, len(logits)
        columns = len(self._layout.embedding)
        own = max(0, min(columns, self._layout.vocab_size - self._rank * columns))
        blocks = num_vocab_blocks(columns)
        bests = take("bests", (num_wanted, blocks, 3))
        places = take("places", (num_wanted, blocks), torch.int32)
        self._launches.best_of_blocks(logits, own, bests, places)
        all_bests = self._exchange.gather(bests, "bests", self.buffers)
        all_places = self._exchange.gather(places, "places", self.buffers)
        tokens, sums = take("tokens", (num_wanted,), torch.int32), take("logsumexps", (num_wanted,))
        self._launches.best_of_rows(all_bests, all_places, columns, tokens, sums)

    def mix(self, index: int, qkv: Tensor, step: StepTensors, pages: LayerCache) -> Tensor:
        """Attention of a layer: qkv [T, all heads], float32 -> [T, heads * dim]. Writes the step's keys and values."""
        attention = attention_of(self._layout.layers[index])
        rotary = attention.rotary
        width = attention.num_heads * attention.head_dim
        queries = self.buffers.take("queries", (step.num_rows, width), self._layout.dtype)
        angles = None if rotary is None else self._weights.angles[rotary]
        interleaved = rotary is not None and self._layout.rotaries[rotary].interleaved
        self._launches.split_heads(attention, qkv, step, angles, interleaved, queries, pages)
        return self.mix_again(index, step, pages)

    def mix_again(self, index: int, step: StepTensors, pages: LayerCache) -> Tensor:
        """Output of the queries that were split last, for these pages."""
        attention = attention_of(self._layout.layers[index])
        shape = (step.num_rows, attention.num_heads * attention.head_dim)
        queries, mixed = (self.buffers.take(name, shape, self._layout.dtype) for name in ("queries", "mixed"))
        self._launches.attend(attention, queries, pages, step, self._split_space(attention, step), mixed)
        return mixed

    def _residual(self, step: StepTensors) -> Tensor:
        return self.buffers.take("residual", (step.num_rows, self._layout.hidden_size))

    def _normed(self, step: StepTensors, name: str = "normed") -> Tensor:
        return self.buffers.take(name, (step.num_rows, self._layout.hidden_size), self._layout.dtype)

    def _begin_layer(self, index: int, residual: Tensor, step: StepTensors) -> None:
        """The norm that otherwise the layer before has taken."""
        self._launches.add_norm(residual, None, self._layout.layers[index].attention_norm, self._normed(step))

    def _layer(
        self, index: int, residual: Tensor, step: StepTensors, cache: KVCache, head: tuple[Tensor, Tensor] | None
    ) -> None:
        """One layer, whose first norm has been taken, and the next one's first norm or the head's."""
        layer, add = self._layout.layers[index], self._launches.add_norm
        normed = own = self._normed(step)
        if layer.parallel and layer.mlp_norm is not None:
            own = self._normed(step, "mlp normed")
            add(residual, None, layer.mlp_norm, own)
        attention = attention_of(layer)
        mixed = self._attention(index, attention, normed, step, cache)
        bias, out_norm, scale = attention.output.bias, layer.attention_out_norm, layer.residual_scale
        if layer.parallel:
            add(residual, mixed, None, None, bias=bias, out_norm=out_norm, scale=scale)
        else:
            add(residual, mixed, layer.mlp_norm, normed, bias=bias, out_norm=out_norm, scale=scale)
        fed = self._mlp_or_mixture(index, layer, own, step)
        self._end_layer(index, layer, residual, fed, normed, head)

    def _end_layer(
        self,
        index: int,
        layer: Layer,
        residual: Tensor,
        fed: Tensor,
        normed: Tensor,
        head: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Adds the MLP's output, and takes the norm that follows."""
        norm: Norm | None = None
        out: Tensor | None = None
        wanted: Tensor | None = None
        if head is not None and index == len(self._layout.layers) - 1:
            norm, (wanted, out) = self._layout.norm, head
        elif head is not None:
            norm, out = self._layout.layers[index + 1].attention_norm, normed
        self._launches.add_norm(
            residual,
            fed,
            norm,
            out,
            bias=layer.mlp.down.bias if isinstance(layer.mlp, Mlp) else None,
            out_norm=layer.mlp_out_norm,
            scale=layer.residual_scale,
            wanted=wanted,
            progress=self._progress,
        )

    def _attention(self, index: int, attention: Attention, x: Tensor, step: StepTensors, cache: KVCache) -> Tensor:
        """The parts of attention's output [parts, T, hidden]."""
        qkv = self.buffers.take("qkv", (1, step.num_rows, attention.qkv.out_features))
        self._launches.linear(x, attention.qkv, qkv)
        self._adapters.add(f"{index}.qkv", x, step, qkv)
        self._norm_all_heads(attention, qkv[0])
        mixed = self.mix(index, qkv[0], step, cache.layers[index])
        return self._row_parallel(mixed, attention.output, attention.num_slices, f"{index}.output", step)

    def _norm_all_heads(self, attention: Attention, qkv: Tensor) -> None:
        """The norms over all heads together, in place."""
        ends = (attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim)
        start = 0
        for norm, width in zip((attention.query_norm, attention.key_norm), ends, strict=True):
            part = qkv[:, start : start + width]
            if norm is not None and norm.weight.dim() == 1 and norm.weight.numel() != attention.head_dim:
                self._launches.add_norm(part, None, norm, part)
            start += width

    def _split_space(self, attention: Attention, step: StepTensors) -> SplitSpace:
        """Room for the splits that are separate programs: the same for every step, so that it never moves."""
        outside = any(
            splits_outside(len(tiles.table), attention.num_kv_heads, tiles.num_splits) for tiles in step.tiles
        )
        _, widest = tile_columns(attention.num_heads // attention.num_kv_heads, attention.head_dim)
        columns = MAX_OUTSIDE_SPLITS * widest if outside else 1
        take, dims = self.buffers.take, max(16, 1 << (attention.head_dim - 1).bit_length())
        return SplitSpace(
            take("split totals", (columns * dims,)), take("split bests", (columns,)), take("split weights", (columns,))
        )

    def _mlp_or_mixture(self, index: int, layer: Layer, x: Tensor, step: StepTensors) -> Tensor:
        """The parts of the output [parts, T, hidden] of the MLP, or of the experts."""
        mixture = self._weights.mixtures[index]
        if mixture is not None:
            own = self._mixtures.run(mixture, x, step.slots)
            return self._exchange.add(own[None], self.buffers)
        assert isinstance(layer.mlp, Mlp), "a layer has an MLP or a mixture"
        return self._mlp(index, layer.mlp, x, step)

    def _mlp(self, index: int, mlp: Mlp, x: Tensor, step: StepTensors) -> Tensor:
        up = self.buffers.take("up", (1, len(x), mlp.up.out_features))
        self._launches.linear(x, mlp.up, up)
        self._adapters.add(f"{index}.up", x, step, up)
        inner = self.buffers.take("inner", (len(x), mlp.down.in_features), self._layout.dtype)
        self._launches.activate(up[0], mlp.activation, mlp.has_gate, inner)
        return self._row_parallel(inner, mlp.down, mlp.num_slices, f"{index}.down", step)

    def _row_parallel(self, x: Tensor, linear: Linear, num_slices: int, place: str, step: StepTensors) -> Tensor:
        """The parts of a sum over all ranks' inputs [parts, T, hidden]."""
        shape = (len(x), self._layout.hidden_size)
        parts = self.buffers.take("parts", (num_slices, *shape))
        self._launches.linear(x, replace(linear, bias=None), parts)
        self._adapters.add(place, x, step, parts)
        return self._exchange.add(parts, self.buffers)


def kv_spec(attention: Attention) -> KVSpec:
    """Shape of a layer's keys and values."""
    return KVSpec(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        key_dim=attention.head_dim,
        value_dim=attention.head_dim,
        sliding_window=attention.sliding_window,
    )
