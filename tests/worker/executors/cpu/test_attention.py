"""Attention of modules over native pages: near the definition in float64, and the same bits in any company."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.cache import TiledCache
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.products import LayerAttention, unfit
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.step_plan import BlockCopy, ScheduledSequence, StepPlan
from tests.worker.executors.cpu.native import BF16, F16, F32, library_or_skip, same_bits

PLAIN = KVSpec(num_heads=4, num_kv_heads=2, key_dim=32, value_dim=32)
SPECS = {
    "grouped": PLAIN,
    "many heads": KVSpec(num_heads=3, num_kv_heads=3, key_dim=48, value_dim=48),
    "odd group": KVSpec(num_heads=7, num_kv_heads=1, key_dim=64, value_dim=64),
    "more heads than rows of a task": KVSpec(num_heads=66, num_kv_heads=1, key_dim=16, value_dim=16),
    "latent": KVSpec(num_heads=4, num_kv_heads=2, key_dim=192, value_dim=128),
    "short keys": KVSpec(num_heads=4, num_kv_heads=4, key_dim=12, value_dim=40),
    "widest": KVSpec(num_heads=2, num_kv_heads=1, key_dim=576, value_dim=576),
    "window": replace(PLAIN, sliding_window=100),
    "narrow window": replace(PLAIN, sliding_window=7),
    "softcap": replace(PLAIN, softcap=5.0),
    "sinks and window": replace(PLAIN, has_sinks=True, sliding_window=70),
    "softcap and sinks": KVSpec(num_heads=6, num_kv_heads=2, key_dim=24, value_dim=16, softcap=5.0, has_sinks=True),
}
SCALING, LENGTH = 0.3, 150
TOLERANCES = {F32: 2e-6, F16: 2e-3, BF16: 2e-2}
"""Of the largest value: some roundings of the dtype."""


@dataclass
class Text:
    """Queries, keys and values of one sequence, [heads, tokens, dim], and the sinks of the layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None

    @classmethod
    def made(cls, spec: KVSpec, dtype: torch.dtype = F32, seed: int = 0, length: int = LENGTH) -> "Text":
        """Queries, keys and values as parts of one projection."""
        generator = torch.Generator().manual_seed(seed)
        widths = [spec.num_heads * spec.key_dim, spec.num_kv_heads * spec.key_dim, spec.num_kv_heads * spec.value_dim]
        rows = torch.randn(length, sum(widths), generator=generator).to(dtype).split(widths, 1)
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = [part.unflatten(1, (count, -1)).transpose(0, 1) for part, count in zip(rows, counts, strict=True)]
        return cls(*parts, torch.linspace(-1, 2, spec.num_heads).to(dtype) if spec.has_sinks else None)

    def exact(self, spec: KVSpec, first: int = 0) -> Tensor:
        """Attention of the tokens from `first` on, by definition, in float64: [tokens, heads, dim]."""
        group = spec.num_heads // spec.num_kv_heads
        query = self.query[:, first:].double()
        key, value = (part.double().repeat_interleave(group, 0) for part in (self.key, self.value))
        scores = query @ key.mT * SCALING
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        places = torch.arange(self.query.shape[1])
        distance = places[first:, None] - places
        hidden = (distance < 0) | (distance >= (spec.sliding_window or len(places)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, query.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        return (scores.softmax(-1)[..., : len(places)] @ value).transpose(0, 1)


class Layer:
    """One attention layer over a cache of its own, with room for several sequences."""

    def __init__(
        self,
        spec: KVSpec,
        dtype: torch.dtype = F32,
        *,
        block_size: int = 16,
        threads: int = 1,
        length: int = LENGTH,
        in_int8: bool = False,
    ) -> None:
        library_or_skip()
        self.spec, self.block_size = spec, block_size
        self.blocks_each = -(-2 * length // block_size)
        pool = NativePool(threads)
        num_blocks = 8 * self.blocks_each
        self.cache = TiledCache([spec], num_blocks, block_size, dtype, pool.library, in_int8=in_int8)
        self.attention = LayerAttention(pool, [spec], self.cache, dtype)

    def step(self, shares: list[tuple[Text, int, int, int]], copies: tuple[BlockCopy, ...] = ()) -> list[Tensor]:
        """One step of (text, place, first position, number of tokens) each; the outputs of each.

        A sequence's blocks are those of its place, from last to first: block ids say nothing of order.
        """
        batch = self.batch([(place, first, count) for _, place, first, count in shares], copies)

        def packed(name: str) -> Tensor:
            return torch.cat([getattr(text, name)[:, first : first + count] for text, _, first, count in shares], 1)

        with self.cache.step(batch):
            self.attention.begin(batch)
            rows = (packed(name) for name in ("query", "key", "value"))
            output = self.attention.attend(0, *rows, SCALING, shares[0][0].sinks)
        return list(output.split([count for *_, count in shares]))

    def blocks(self, place: int, count: int) -> tuple[int, ...]:
        last = (place + 1) * self.blocks_each - 1
        return tuple(range(last, last - count, -1))

    def batch(self, shares: list[tuple[int, int, int]], copies: tuple[BlockCopy, ...] = ()) -> StepBatch:
        sequences = tuple(
            ScheduledSequence(
                sequence_id=place,
                first_position=first,
                token_ids=(0,) * count,
                block_ids=self.blocks(place, -(-(first + count) // self.block_size)),
                draw=None,
            )
            for place, first, count in shares
        )
        return StepBatch.of(StepPlan(step_id=0, others=sequences, block_copies=copies))

    def run(self, text: Text, chunk: Callable[[], int], strangers: Callable[[], int] = lambda: 0) -> Tensor:
        """A whole text, chunk by chunk, each in the company of some steps of other sequences."""
        stranger = Text.made(self.spec, text.query.dtype, seed=99)
        outputs, position, length = [], 0, text.query.shape[1]
        while position < length:
            count = min(chunk(), length - position)
            shares = [(stranger, 1 + i, 37 * i, 1 + i * i) for i in range(strangers())]
            own = len(shares) // 2
            shares.insert(own, (text, 0, position, count))
            outputs.append(self.step(shares)[own])
            position += count
        return torch.cat(outputs)


def check(spec: KVSpec, dtype: torch.dtype, block_size: int) -> None:
    layer, text, rng = (
        Layer(spec, dtype, block_size=block_size),
        Text.made(spec, dtype),
        random.Random(0),
    )
    whole = layer.run(text, lambda: LENGTH)
    assert whole.dtype == dtype
    error = (whole.double() - text.exact(spec)).abs().max() / text.value.double().abs().max()
    assert error < TOLERANCES[dtype], f"{error:.1e}"
    for chunk in (lambda: 1, lambda: 7, lambda: 64, lambda: rng.choice([1, 3, 30, 100])):
        assert same_bits(layer.run(text, chunk, strangers=lambda: rng.randrange(5)), whole)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", SPECS)
def test_outputs_are_near_the_exact_ones_and_bits_the_same_in_any_chunks_and_company(name, block_size):
    check(SPECS[name], F32, block_size)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", ["grouped", "latent", "short keys", "softcap and sinks"])
def test_half_types_are_near_the_exact_outputs_with_the_same_bits_in_any_company(name, dtype):
    check(SPECS[name], dtype, 16)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_rank_with_some_of_the_heads_has_their_bits(dtype):
    spec = SPECS["softcap and sinks"]
    text = Text.made(spec, dtype)
    whole = Layer(spec, dtype).run(text, lambda: 40)
    for rank in range(2):
        heads, kv_head = slice(3 * rank, 3 * rank + 3), slice(rank, rank + 1)
        share = Text(text.query[heads], text.key[kv_head], text.value[kv_head], text.sinks[heads])
        layer = Layer(replace(spec, num_heads=3, num_kv_heads=1), dtype)
        assert same_bits(layer.run(share, lambda: 7), whole[:, heads].contiguous())


@pytest.mark.parametrize("name", ["grouped", "more heads than rows of a task", "latent", "sinks and window"])
def test_a_long_context_is_cut_alike_for_one_thread_and_for_many(name):
    """Contexts of more than 1024 keys are attended to in parts, by several threads where they have nothing else."""
    spec, length = SPECS[name], 1040
    text = Text.made(spec, length=length)
    one, many = (Layer(spec, block_size=512, threads=threads, length=length) for threads in (1, 4))
    whole = one.run(text, lambda: length)
    assert (whole[960:].double() - text.exact(spec, first=960)).abs().max() < 1e-5
    many.run(Text(text.query[:, :1020], text.key[:, :1020], text.value[:, :1020], text.sinks), lambda: 1020)
    for first in (*range(1020, 1034), 1034):
        count = 1 if first < 1034 else length - first
        assert same_bits(many.step([(text, 0, first, count)])[0], whole[first : first + count]), first


@pytest.mark.parametrize("name", ["grouped", "window", "latent", "softcap and sinks"])
def test_what_strangers_left_in_the_blocks_is_never_felt(name):
    spec = SPECS[name]
    text = Text.made(spec)
    clean = Layer(spec).run(text, lambda: 7)
    layer = Layer(spec)
    for pages in layer.cache._layers:
        pages.pages.fill_(torch.nan)
    assert same_bits(layer.run(text, lambda: 7), clean)


def test_a_stranger_full_of_nan_spoils_only_itself():
    layer, text = Layer(PLAIN), Text.made(PLAIN)
    (clean,) = layer.step([(text, 0, 0, 50)])
    bad = Text.made(PLAIN, seed=1)
    bad.key[:] = bad.value[:] = torch.nan
    spoilt, beside = layer.step([(bad, 3, 0, 50), (text, 0, 0, 50)])
    assert spoilt.isnan().all()
    assert same_bits(beside, clean)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_fork_goes_on_from_a_copy_of_a_part_of_a_block(dtype):
    """Its own slots behind the copied ones are cleared, whatever the source has there."""
    spec = SPECS["latent"]
    layer, text = Layer(spec, dtype), Text.made(spec, dtype)
    whole = layer.run(text, lambda: LENGTH)
    shared, tail = divmod(100, 16)
    sources, targets = layer.blocks(0, shared + 1), layer.blocks(1, shared + 1)
    copies = tuple(
        BlockCopy(source=source, destination=target, num_tokens=16 if index < shared else tail)
        for index, (source, target) in enumerate(zip(sources, targets, strict=True))
    )
    (forked,) = layer.step([(text, 1, 100, 50)], copies)
    assert same_bits(forked, whole[100:])


def test_layers_of_different_kinds_share_a_step():
    """As in a model whose layers alternate between a window and full attention."""
    library_or_skip()
    specs = [PLAIN, SPECS["window"], SPECS["latent"], PLAIN]
    pool = NativePool(2)
    cache = TiledCache(specs, 64, 16, F32, pool.library)
    attention = LayerAttention(pool, specs, cache, F32)
    place = Layer(PLAIN)
    for first, count in ((0, 149), (149, 1)):
        batch = place.batch([(0, first, count)])
        with cache.step(batch):
            attention.begin(batch)
            for index, spec in enumerate(specs):
                text = Text.made(spec, seed=index)
                rows = (part[:, first : first + count] for part in (text.query, text.key, text.value))
                output = attention.attend(index, *rows, SCALING, None)
                torch.testing.assert_close(
                    output.double(), text.exact(spec)[first : first + count], rtol=1e-5, atol=1e-5
                )


def test_heads_of_too_many_dimensions_are_refused():
    assert unfit([PLAIN, SPECS["widest"]]) is None
    assert unfit([PLAIN, replace(PLAIN, key_dim=584)]) == "heads have 584 dimensions; the maximum is 576"
