"""Gathering attention: right by a float64 reference, and the same bits whatever the batch and the chunks."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import KVCache, KVSpec
from holdfast.worker.models.gpu_gather import GatherAttention, begun_blocks, slots_of
from holdfast.worker.models.gpu_query_tiles import cut_into_tiles
from holdfast.worker.models.gpu_row_rules import RowRule, RowRules
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

PLAIN = KVSpec(num_heads=4, num_kv_heads=2, key_dim=32, value_dim=32)
SPECS = {
    "grouped": PLAIN,
    "many heads": KVSpec(num_heads=3, num_kv_heads=3, key_dim=48, value_dim=48),
    "odd group": KVSpec(num_heads=7, num_kv_heads=1, key_dim=64, value_dim=64),
    "latent": KVSpec(num_heads=4, num_kv_heads=2, key_dim=48, value_dim=32),
    "window": replace(PLAIN, sliding_window=100),
    "narrow window": replace(PLAIN, sliding_window=7),
    "softcap": replace(PLAIN, softcap=5.0),
    "sinks and window": replace(PLAIN, has_sinks=True, sliding_window=70),
    "softcap and sinks": KVSpec(num_heads=6, num_kv_heads=2, key_dim=32, value_dim=16, softcap=5.0, has_sinks=True),
}
SCALING = 0.3
RULES = RowRules(torch.device("cpu"))
LENGTH = 210


@dataclass
class Text:
    """Queries, keys and values of one sequence, [tokens, heads, dim], and the sinks of the layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None

    @classmethod
    def made(cls, spec: KVSpec, dtype: torch.dtype = torch.float32, seed: int = 0, length: int = LENGTH) -> "Text":
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (spec.num_heads, spec.key_dim),
            (spec.num_kv_heads, spec.key_dim),
            (spec.num_kv_heads, spec.value_dim),
        )
        tensors = [torch.randn(length, *shape, generator=generator).to(dtype) for shape in shapes]
        sinks = torch.linspace(-1, 2, spec.num_heads).to(dtype) if spec.has_sinks else None
        return cls(*tensors, sinks)


class Layer:
    """One attention layer over a cache of its own, with room for several sequences."""

    def __init__(self, spec: KVSpec, *, block_size: int = 16, dtype: torch.dtype = torch.float32) -> None:
        self.spec = spec
        self.block_size = block_size
        self.blocks_each = -(-2 * LENGTH // block_size)
        self.cache = KVCache.allocate([spec], 12 * self.blocks_each, block_size, dtype, "cpu")
        self.attention = GatherAttention(self.cache, RULES)

    def step(self, shares: list[tuple[Text, int, int, int]]) -> list[Tensor]:
        """One step of (text, place, first position, number of tokens) each; the outputs of each.

        A sequence's blocks are those of its place, from last to first: block ids say nothing of order.
        """
        self.attention.begin(self.batch([(place, first, count) for _, place, first, count in shares]))

        def packed(name: str) -> Tensor:
            return torch.cat([getattr(text, name)[first : first + count] for text, _, first, count in shares])

        (layer,) = self.cache.layers
        self.attention.write(layer, packed("key").transpose(0, 1), packed("value").transpose(0, 1))
        output = self.attention.attend(layer, packed("query"), SCALING, shares[0][0].sinks)
        return list(output.split([count for *_, count in shares]))

    def batch(self, shares: list[tuple[int, int, int]]) -> StepBatch:
        return batch_of(shares, self.block_size, self.blocks_each)


def batch_of(shares: list[tuple[int, int, int]], block_size: int, blocks_each: int) -> StepBatch:
    """A step of (place, first position, number of tokens) each."""
    sequences = []
    for place, first, count in shares:
        last_block = (place + 1) * blocks_each - 1
        num_blocks = -(-(first + count) // block_size)
        blocks = tuple(range(last_block, last_block - num_blocks, -1))
        sequences.append(
            ScheduledSequence(
                sequence_id=place, first_position=first, token_ids=(0,) * count, block_ids=blocks, draw=None
            )
        )
    return StepBatch.of(StepPlan(step_id=0, others=tuple(sequences)))


def run_in_chunks(
    layer: Layer, text: Text, chunk: Callable[[], int], strangers: Callable[[], int] = lambda: 0
) -> Tensor:
    """A whole text, chunk by chunk, each in the company of some steps of other sequences."""
    stranger = Text.made(layer.spec, text.query.dtype, seed=99)
    outputs, position, length = [], 0, len(text.query)
    while position < length:
        count = min(chunk(), length - position)
        shares = [(stranger, 1 + i, 37 * i, 1 + i * i) for i in range(strangers())]
        own = len(shares) // 2
        shares.insert(own, (text, 0, position, count))
        outputs.append(layer.step(shares)[own])
        position += count
    return torch.cat(outputs)


def reference(spec: KVSpec, text: Text) -> Tensor:
    """Attention by definition, in float64."""
    group = spec.num_heads // spec.num_kv_heads
    query = text.query.double().transpose(0, 1)
    key, value = (t.double().transpose(0, 1).repeat_interleave(group, 0) for t in (text.key, text.value))
    scores = query @ key.transpose(1, 2) * SCALING
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    distance = torch.arange(len(text.query))[:, None] - torch.arange(len(text.query))
    hidden = distance < 0 if spec.sliding_window is None else (distance < 0) | (distance >= spec.sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if text.sinks is not None:
        sinks = text.sinks.double()[:, None, None].expand(-1, len(text.query), 1)
        return (torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1] @ value).transpose(0, 1)
    return (torch.softmax(scores, -1) @ value).transpose(0, 1)


IN_LARGE_BLOCKS = ("sinks and window",)
"""Tried there every time."""
LAYERS = [
    pytest.param(
        spec, size, id=f"{name}-{size}", marks=[] if size == 16 or name in IN_LARGE_BLOCKS else pytest.mark.slow
    )
    for name, spec in SPECS.items()
    for size in (16, 128)
]


@pytest.mark.parametrize(("spec", "block_size"), LAYERS)
def test_outputs_are_right_and_bits_the_same_in_any_chunks_and_company(spec, block_size):
    layer, text, rng = Layer(spec, block_size=block_size), Text.made(spec), random.Random(0)
    whole = run_in_chunks(layer, text, lambda: LENGTH)
    torch.testing.assert_close(whole.double(), reference(spec, text), rtol=1e-5, atol=1e-5)
    for chunk in (lambda: 1, lambda: 7, lambda: 64, lambda: rng.choice([1, 3, 30, 100])):
        assert torch.equal(run_in_chunks(layer, text, chunk, strangers=lambda: rng.randrange(5)), whole)


@pytest.mark.parametrize("spec", [PLAIN, SPECS["odd group"], SPECS["softcap and sinks"]])
def test_bits_are_the_same_in_bfloat16(spec):
    layer, text, rng = Layer(spec, dtype=torch.bfloat16), Text.made(spec, torch.bfloat16), random.Random(0)
    whole = run_in_chunks(layer, text, lambda: LENGTH)
    torch.testing.assert_close(whole.double(), reference(spec, text), rtol=0.1, atol=0.1)
    for chunk in (lambda: 1, lambda: 7, lambda: rng.choice([1, 3, 30, 100])):
        assert torch.equal(run_in_chunks(layer, text, chunk, strangers=lambda: rng.randrange(5)), whole)


@pytest.mark.parametrize("spec", [PLAIN, SPECS["window"], SPECS["softcap and sinks"]])
@pytest.mark.parametrize("garbage", [torch.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (1e30, torch.inf))])
def test_what_strangers_left_in_the_blocks_is_never_felt(spec, garbage):
    text = Text.made(spec)
    clean = run_in_chunks(Layer(spec), text, lambda: 7)
    layer = Layer(spec)
    for pool in (layer.cache.layers[0].keys, layer.cache.layers[0].values):
        pool.fill_(garbage)
    assert torch.equal(run_in_chunks(layer, text, lambda: 7), clean)


def test_a_stranger_full_of_nan_spoils_only_itself():
    layer, text = Layer(PLAIN), Text.made(PLAIN)
    clean = layer.step([(text, 0, 0, 50)])[0]
    bad = Text.made(PLAIN, seed=1)
    bad.key[:] = bad.value[:] = torch.nan
    spoilt, beside = layer.step([(bad, 3, 0, 50), (text, 0, 0, 50)])
    assert spoilt.isnan().all()
    assert torch.equal(beside, clean)


def test_sequences_at_the_same_tile_share_one_call():
    rule = RowRule(multiple_of=4)
    places = [(place, 64 + 3 * place, 1) for place in range(12)]
    (call,) = cut_into_tiles(batch_of(places, 16, 20), PLAIN, rule, 16).calls
    assert (call.num_tiles, call.num_rows, call.num_keys, call.one_token) == (12, 4, 128, True)
    apart = [(place, 64 * (place % 3), 1) for place in range(12)]
    assert [call.num_tiles for call in cut_into_tiles(batch_of(apart, 16, 20), PLAIN, rule, 16).calls] == [4, 4, 4]


def test_a_prompt_is_cut_at_absolute_positions():
    tiles = cut_into_tiles(batch_of([(0, 50, 100)], 16, 20), PLAIN, RowRule(multiple_of=4), 16)
    assert sorted((call.num_keys, call.num_rows) for call in tiles.calls) == [(64, 28), (128, 128), (192, 44)]


def test_a_window_bounds_the_keys_that_are_read():
    spec = replace(PLAIN, sliding_window=65)
    for position, num_keys in ((0, 64), (64, 128), (127, 128), (128, 128), (5000, 128)):
        (call,) = cut_into_tiles(batch_of([(0, position, 1)], 16, 400), spec, RowRule(), 16).calls
        assert call.num_keys == num_keys


def test_no_call_gathers_more_than_is_allowed():
    places = [(place, 4000, 1) for place in range(40)]
    tiles = cut_into_tiles(batch_of(places, 16, 260), PLAIN, RowRule(), 16, max_call_values=2**20)
    assert sum(call.num_tiles for call in tiles.calls) == 40
    assert max(call.num_tiles * call.num_keys * PLAIN.values_per_token for call in tiles.calls) <= 2**20
    assert len(tiles.calls) > 1


def test_layers_of_different_kinds_share_a_step():
    """As in a model whose layers alternate between a window and full attention."""
    specs = [PLAIN, SPECS["window"], SPECS["latent"], PLAIN]
    cache = KVCache.allocate(specs, 64, 16, torch.float32, "cpu")
    attention = GatherAttention(cache, RULES)
    for first, count in ((0, 150), (150, 1)):
        attention.begin(batch_of([(0, first, count)], 16, 64))
        for index, spec in enumerate(specs):
            text = Text.made(spec, seed=index)
            part = slice(first, first + count)
            layer = cache.layers[index]
            attention.write(layer, text.key[part].transpose(0, 1), text.value[part].transpose(0, 1))
            output = attention.attend(layer, text.query[part], SCALING, None)
            expected = reference(spec, Text.made(spec, seed=index))[part]
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_slots_and_begun_blocks_follow_the_block_tables():
    batch = batch_of([(0, 14, 4), (1, 0, 16), (2, 5, 1), (3, 32, 1)], 16, 10)
    assert slots_of(batch, 16)[:4].tolist() == [9 * 16 + 14, 9 * 16 + 15, 8 * 16, 8 * 16 + 1]
    assert begun_blocks(batch, 16).tolist() == [8, 37]
