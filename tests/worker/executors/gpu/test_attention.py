"""Paged attention against float64, over drawn shapes; a query's bits are the same in any company and any tile."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.executors import kv_cache as fp8
from holdfast.worker.executors.gpu import launches as launches_module
from holdfast.worker.executors.gpu.launches import AttentionTiles, Launches, SplitSpace, StepTensors
from holdfast.worker.executors.gpu.layers import kv_spec
from holdfast.worker.executors.gpu.step_arrays import query_tiles
from holdfast.worker.executors.kv_cache import KVCache, LayerCache
from holdfast.worker.executors.layout import Attention
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.step_batch import StepBatch
from tests.worker.executors.gpu.runs import spoil

TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 2e-5}
NOTHING = Linear(weights=(torch.empty(0, 0),))


@dataclass(frozen=True)
class Case:
    """Sequences as (first position, tokens of this step), and how their attention is made."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    """None: as the keys'."""
    block: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def attention(self) -> Attention:
        heads = self.kv_heads * self.group
        generator = torch.Generator().manual_seed(self.seed + 1)
        return Attention(
            num_heads=heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qkv=NOTHING,
            rotary=None,
            scaling=self.head_dim**-0.5,
            sliding_window=self.window,
            softcap=self.softcap,
            sinks=torch.randn(heads, generator=generator) if self.has_sinks else None,
            output=NOTHING,
        )


class Memory:
    """Keys and values of each sequence, and the pages that hold them; all other slots are NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        shape, of_values = (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim or case.head_dim)
        ends = [first + count for first, count in case.sequences]
        self.keys = [torch.randn(end, *shape, generator=generator).to(case.dtype) for end in ends]
        self.values = [torch.randn(end, *of_values, generator=generator).to(case.dtype) for end in ends]
        heads = case.kv_heads * case.group
        self.queries = [
            torch.randn(count, heads, case.head_dim, generator=generator).to(case.dtype) for _, count in case.sequences
        ]

    def rounded(self) -> "Memory":
        """The same with what keys and values in fp8 are read as."""
        other = Memory(self.case)
        for parts in (other.keys, other.values):
            parts[:] = [fp8.decoded(*fp8.encoded(part), self.case.dtype) for part in parts]
        return other

    def run(self, chosen: list[int], columns: tuple[int, int] | None = None, *, in_fp8: bool = False) -> list[Tensor]:
        """Attention's output of these sequences, in one step in this order."""
        case, launches = self.case, Launches(launch)
        order = np.random.default_rng(case.seed + len(chosen)).permutation(400)
        counts = [-(-len(self.keys[number]) // case.block) for number in chosen]
        tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        pages = self._pages(chosen, tables, in_fp8)
        batch = self._batch(chosen, tables)
        widths = columns or (16, 32)
        tiles = query_tiles(batch, widths, case.group)
        kinds = ((tiles.narrow, widths[0], tiles.narrow_splits), (tiles.wide, widths[1], tiles.wide_splits))
        flat = torch.zeros(len(chosen), max(counts), dtype=torch.int32)
        for row, table in zip(flat, tables, strict=True):
            row[: len(table)] = torch.from_numpy(table)
        padding = np.zeros((1, 3), dtype=np.int32)
        step = StepTensors(
            token_ids=torch.zeros(len(batch.token_ids), dtype=torch.int32),
            positions=torch.from_numpy(batch.positions.astype(np.int32)),
            slots=torch.zeros(len(batch.token_ids), dtype=torch.int32),
            tables=flat,
            tiles=tuple(
                AttentionTiles(torch.from_numpy(np.concatenate((table, padding))), width, splits)
                for table, width, splits in kinds
                if len(table)
            ),
        )
        queries = torch.cat([self.queries[number] for number in chosen]).flatten(1)
        programs = max(kind.num_splits * len(kind.table) for kind in step.tiles) * case.kv_heads
        space = SplitSpace(*(torch.full((programs * max(widths) * size,), torch.nan) for size in (256, 1, 1)))
        out = queries.new_full((len(queries), case.kv_heads * case.group * pages.spec.value_dim), torch.nan)
        launches.attend(case.attention, queries, pages, step, space, out)
        return list(out.split([case.sequences[number][1] for number in chosen]))

    def _pages(self, chosen: list[int], tables: list[np.ndarray], in_fp8: bool) -> LayerCache:
        case, num_blocks = self.case, max(int(table.max()) for table in tables) + 1
        spec = replace(kv_spec(case.attention), value_dim=case.value_dim or case.head_dim)
        cache = KVCache.allocate([spec], num_blocks, case.block, case.dtype, "cpu", in_fp8=in_fp8)
        (pages,) = cache.layers
        spoil(pages)
        for number, table in zip(chosen, tables, strict=True):
            positions = np.arange(len(self.keys[number]))
            blocks, slots = torch.from_numpy(table[positions // case.block]), torch.from_numpy(positions % case.block)
            for pool, scales, rows in (
                (pages.keys, pages.key_scales, self.keys[number]),
                (pages.values, pages.value_scales, self.values[number]),
            ):
                if scales is None:
                    pool[blocks, slots] = rows
                else:
                    pool[blocks, slots], scales[blocks, :, slots] = fp8.encoded(rows)
        return pages

    def _batch(self, chosen: list[int], tables: list[np.ndarray]) -> StepBatch:
        firsts, counts = (np.array([self.case.sequences[number][part] for number in chosen]) for part in (0, 1))
        return StepBatch(
            step_id=0,
            token_ids=np.zeros(counts.sum(), dtype=np.int64),
            first_positions=firsts,
            num_tokens=counts,
            num_draws=counts,
            block_ids=np.concatenate(tables),
            num_blocks=np.array([len(table) for table in tables]),
            block_copies=np.zeros((3, 0), dtype=np.int64),
            logits_rows=np.arange(counts.sum()),
        )

    def expected(self, number: int) -> Tensor:
        """In float64."""
        case, attention = self.case, self.case.attention
        first, count = case.sequences[number]
        q = self.queries[number].double().transpose(0, 1)
        k, v = (part[number].double().repeat_interleave(case.group, 1) for part in (self.keys, self.values))
        scores = q @ k.permute(1, 2, 0) * attention.scaling
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        distance = torch.arange(first, first + count)[:, None] - torch.arange(first + count)
        hidden = distance < 0
        if case.window is not None:
            hidden |= distance >= case.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if attention.sinks is not None:
            sinks = attention.sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : first + count]
        return (weights @ v.transpose(0, 1)).transpose(0, 1).flatten(1)


def check_fp8(case: Case) -> None:
    """Attention over keys and values in fp8 has the bits of attention over the numbers that they are read as."""
    memory = Memory(case)
    everyone = list(range(len(case.sequences)))
    for found, expected in zip(memory.run(everyone, in_fp8=True), memory.rounded().run(everyone), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, expected)


def check(case: Case) -> None:
    memory = Memory(case)
    everyone = list(range(len(case.sequences)))
    together = memory.run(everyone)
    tolerance = TOLERANCES[case.dtype]
    for number in everyone:
        torch.testing.assert_close(together[number].double(), memory.expected(number), rtol=0, atol=tolerance)
        (alone,) = memory.run([number])
        assert torch.equal(alone, together[number])


TINY = Case(sequences=((0, 3), (70, 1), (15, 17)))


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, window=20, softcap=5.0, has_sinks=True, dtype=torch.float32),
        replace(TINY, head_dim=24, value_dim=16, group=1, kv_heads=3),
        replace(TINY, head_dim=80, kv_heads=2, group=3, block=64, sequences=((63, 2), (128, 1))),
    ],
)
def test_attention_is_exact_and_the_same_alone(case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, window=20, softcap=5.0, has_sinks=True, dtype=torch.float16),
        replace(TINY, head_dim=24, value_dim=16, group=1, kv_heads=3),
        replace(TINY, head_dim=80, kv_heads=2, group=3, block=64, sequences=((63, 2), (128, 1))),
        Case(sequences=((1100, 2),), block=64, window=1090, value_dim=40),
    ],
)
def test_keys_and_values_in_fp8_are_attended_as_the_numbers_that_they_are_read_as(case):
    check_fp8(case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.deferred(lambda: cases()))
def test_keys_and_values_in_fp8_are_attended_so_for_any_shape(case):
    check_fp8(case)


def test_a_row_in_fp8_that_has_lost_its_numbers_is_noticed():
    """It reaches all queries that see it, and no other sequence."""
    for name in ("keys", "values"):
        memory = Memory(replace(TINY, sequences=((70, 1), (20, 3))))
        getattr(memory, name)[1][21, 0, 5] = torch.inf
        first, second = memory.run([0, 1], in_fp8=True)
        assert first.isfinite().all()
        assert second[1:].isnan().all()


@pytest.mark.parametrize("value_dim", [None, 40])
def test_splits_inside_and_outside_a_program_have_equal_bits(monkeypatch, value_dim):
    case = Case(sequences=((1100, 2), (1023, 1)), block=64, window=1090, has_sinks=True, value_dim=value_dim)
    outside = Memory(case).run([0, 1])
    monkeypatch.setattr(launches_module, "_FULL_DEVICE", 0)
    inside = Memory(case).run([0, 1])
    for left, right in zip(outside, inside, strict=True):
        assert torch.equal(left, right)
    for number in (0, 1):
        torch.testing.assert_close(inside[number].double(), Memory(case).expected(number), rtol=0, atol=0.02)


def test_a_row_has_the_same_bits_in_a_tile_of_any_width():
    memory = Memory(replace(TINY, sequences=((61, 9),)))
    (narrow,), (wide,) = memory.run([0], (16, 16)), memory.run([0], (16, 64))
    assert torch.equal(narrow, wide)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_dim = draw(st.sampled_from((64, 80, 96, 128, 192, 256)))
    number = draw(st.integers(1, 4))
    starts = st.one_of(st.integers(0, 200), st.sampled_from((0, 15, 16, 63, 64, 127, 128, 1023, 1024, 2049)))
    sequences = tuple((draw(starts), draw(st.one_of(st.just(1), st.integers(1, 40)))) for _ in range(number))
    return Case(
        sequences=sequences,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16))),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from((None, 16, 64, 128))),
        block=draw(st.sampled_from((16, 32, 64, 128))),
        window=draw(st.one_of(st.none(), st.integers(1, 100), st.just(1024))),
        softcap=draw(st.sampled_from((None, 2.0, 30.0))),
        has_sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        seed=draw(st.integers(0, 1 << 16)),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cases())
def test_attention_is_exact_and_the_same_alone_for_any_shape(case):
    check(case)
