"""Keys and values in int8 on CPUs: the rule, what is attended, and bits that depend on the sequence alone."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.worker.executors.cpu import int8_proof
from holdfast.worker.executors.cpu.build import CLASSES
from holdfast.worker.executors.cpu.cache import bytes_per_token
from holdfast.worker.executors.cpu.int8_proof import decoded, encoded, int8_difference, kept_rows
from holdfast.worker.executors.cpu.products import LayerAttention
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.models.reference import Reference
from holdfast.worker.step_plan import BlockCopy
from tests.worker.executors.cpu.native import ALL, BF16, F16, F32, library_or_skip, same_bits
from tests.worker.executors.cpu.runs import SPOILT, Runner, layout_of, tokens
from tests.worker.executors.cpu.test_attention import LENGTH, PLAIN, SPECS, TOLERANCES, Layer, Text
from tests.worker.executors.cpu.test_sequences import alone, together
from tests.worker.executors.steps import Part

GROUPED, LATENT, SINKS = SPECS["grouped"], SPECS["latent"], SPECS["softcap and sinks"]
KINDS = ("grouped", "odd group", "latent", "short keys", "narrow window", "softcap and sinks")


# --- the rule ---


def by_loops(row: list[float]) -> tuple[list[int], float]:
    """The codes and the scale of a row of float32 numbers: the rule as `native/codes.h` says it, number by number."""
    if any(math.isnan(x) or math.isinf(x) for x in row):
        return [0] * len(row), math.nan
    least = np.float32(max(abs(x) for x in row)) / np.float32(127)
    if least < np.finfo(np.float32).tiny:
        return [0] * len(row), 0.0
    least = min(least, np.float32(65504))
    scale = np.float16(least)
    if np.float32(scale) < least:
        scale = np.nextafter(scale, np.float16(np.inf))
    codes = [round(float(np.float32(x) / np.float32(scale))) for x in row]  # Python rounds ties to even
    return [min(max(code, -127), 127) for code in codes], float(scale)


def rows_of_all_kinds(dim: int) -> Tensor:
    """[rows, dim]: random ones of all magnitudes, ties, zeros, and numbers at the limits of what is held."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.arange(-130, 20).float()
    rows = [*(torch.randn(len(powers), dim, generator=generator) * torch.exp2(powers)[:, None])]
    for largest in (127.0, 127 * 2.0**-24, 127 * 3 * 2.0**-24, 127 * 2.0**10):
        ties = torch.randint(-126, 126, (dim,), generator=generator) + 0.5
        ties[0] = 127.0
        rows.append(ties * (largest / 127))
    for special in (0.0, -0.0, 1e-40, 1e-36, 1e-12, 65504.0 * 127, 3e38, math.inf, -math.inf, math.nan):
        row = torch.zeros(dim)
        row[dim // 2], row[1] = special, 1e-3 if math.isfinite(special) and special > 1 else 0.0
        rows.append(row)
    return torch.stack(rows)


def assert_same(found: tuple[Tensor, Tensor], expected: list[tuple[list[int], float]]) -> None:
    codes, scales = found
    assert codes.tolist() == [codes for codes, _ in expected]
    np.testing.assert_array_equal(scales.double().numpy(), [scale for _, scale in expected])


@pytest.mark.parametrize("block_size", [16, 64])
def test_rows_are_stored_by_the_rule(block_size):
    """Keys of one head and values of another length: each of them from the library's own pages."""
    spec = KVSpec(num_heads=1, num_kv_heads=1, key_dim=40, value_dim=24)
    keys, values = rows_of_all_kinds(40), rows_of_all_kinds(24)
    layer = Layer(spec, block_size=block_size, length=len(keys), in_int8=True)
    layer.step([(Text(torch.ones(1, len(keys), 40), keys[None], values[None], None), 0, 0, len(keys))])
    order = list(layer.blocks(0, -(-len(keys) // block_size)))
    for rows, (codes, scales) in zip((keys, values), kept_rows(layer.cache, 0), strict=True):
        found = (part[order].flatten(0, 1)[: len(rows), 0] for part in (codes, scales))
        stored_codes, stored_scales = found
        assert not stored_codes[:, rows.shape[1] :].any(), "filled up with zeros"
        expected = [by_loops(row) for row in rows.tolist()]
        assert_same((stored_codes[:, : rows.shape[1]], stored_scales), expected)
        assert_same(encoded(rows), expected)


@pytest.mark.parametrize(("dim", "times"), [(48, 1.92), (64, 1.93), (80, 1.95), (128, 1.96)])
def test_a_token_takes_about_half_of_what_it_takes_in_bfloat16(dim, times):
    """Of a head of 48 dimensions keys are filled up to 64."""
    spec = KVSpec(num_heads=8, num_kv_heads=2, key_dim=dim, value_dim=dim)
    assert bytes_per_token(spec, BF16) / bytes_per_token(spec, BF16, in_int8=True) > times
    plain, small = (Layer(spec, BF16, in_int8=in_int8).cache._layers[0].memory for in_int8 in (False, True))
    assert plain.block_bytes / small.block_bytes > times


# --- what is attended ---


def kept(text: Text, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda *row: row) -> Text:
    """A text whose keys and values are what the cache keeps of them, or what comes of `change` (codes, scales)."""
    key, value = (decoded(*change(*encoded(rows))).double() for rows in (text.key, text.value))
    return replace(text, key=key, value=value)


def error_of(found: Tensor, text: Text, spec: KVSpec) -> float:
    return float((found.double() - text.exact(spec)).abs().max() / text.value.double().abs().max())


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("name", KINDS)
def test_attention_is_that_of_the_rows_that_are_kept_in_any_chunks_and_company(name, dtype):
    """The rows of a chunk among them: no token is attended to but as it is read back."""
    spec, rng = SPECS[name], random.Random(0)
    text, layer = Text.made(spec, dtype), Layer(spec, dtype, in_int8=True)
    whole = layer.run(text, lambda: LENGTH)
    assert error_of(whole, kept(text), spec) < TOLERANCES[dtype]
    for chunk in (lambda: 1, lambda: 7, lambda: 64, lambda: rng.choice([1, 3, 30, 100])):
        assert same_bits(layer.run(text, chunk, strangers=lambda: rng.randrange(5)), whole)


MISTAKES = {
    "a neighbouring token's scale": lambda codes, scales: (codes, scales.roll(1, 1)),
    "a neighbouring head's scale": lambda codes, scales: (codes, scales.roll(1, 0)),
    "the scale that was there before": lambda codes, scales: (codes, scales.flip(1)),
    "rounded to zero": lambda codes, scales: (codes - codes.sign(), scales),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake):
    text, layer = Text.made(GROUPED), Layer(GROUPED, in_int8=True)
    whole = layer.run(text, lambda: 7)
    assert error_of(whole, kept(text, MISTAKES[mistake]), GROUPED) > 100 * TOLERANCES[F32]


def test_rows_of_a_step_that_are_attended_as_they_come_would_be_seen():
    """A token's own key and value before they are rounded, the others as they are kept."""
    text, layer = Text.made(GROUPED), Layer(GROUPED, in_int8=True)
    last = layer.run(text, lambda: LENGTH - 1)[-1:]
    mixed = kept(text)
    assert error_of(last, _last(mixed), GROUPED) < TOLERANCES[F32]
    mixed.key[:, -1], mixed.value[:, -1] = text.key[:, -1].double(), text.value[:, -1].double()
    assert error_of(last, _last(mixed), GROUPED) > 10 * TOLERANCES[F32]


def _last(text: Text) -> Text:
    """A text of which the last token alone asks."""

    class Last(Text):
        def exact(self, spec: KVSpec) -> Tensor:
            return super().exact(spec)[-1:]

    return Last(text.query, text.key, text.value, text.sinks)


@pytest.mark.parametrize("part", [2, 3], ids=["keys", "values"])
def test_a_scale_that_was_there_before_is_felt(part):
    """As after a block is given to another sequence and one scale is not written."""
    text, layer = Text.made(PLAIN), Layer(PLAIN, in_int8=True)
    layer.step([(text, 0, 0, 50)])
    scales = kept_rows(layer.cache, 0)[part - 2][1]
    block, before = layer.blocks(0, 1)[0], None
    (right,) = layer.step([(text, 0, 50, 1)])
    bytes_of_scales = layer.cache.parts(0)[2][block, 0].view(torch.float16)
    before, place = scales[block, 3, 0], 3 if part == 2 else layer.block_size + 3
    assert bytes_of_scales[place] == before
    bytes_of_scales[place] = 1.0
    (wrong,) = layer.step([(text, 0, 50, 1)])
    assert not same_bits(wrong, right)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rows_that_eight_bits_hold_have_the_bits_of_the_models_dtype(dtype):
    """Whole numbers up to 127 times a power of two: nothing is rounded but what is rounded anyway."""
    generator = torch.Generator().manual_seed(0)
    text = Text.made(LATENT, dtype)
    for rows in (text.key, text.value):
        rows[:] = torch.randint(-127, 128, rows.shape, generator=generator) / 64
        rows[..., 0] = 127 / 64
    plain, small = (Layer(LATENT, dtype, in_int8=in_int8).run(text, lambda: 64) for in_int8 in (False, True))
    assert same_bits(plain, small)


@pytest.mark.parametrize("name", ["grouped", "latent", "sinks and window"])
def test_a_long_context_is_cut_alike_for_one_thread_and_for_many(name):
    spec, length = SPECS[name], 1040
    text = Text.made(spec, length=length)
    one, many = (Layer(spec, block_size=512, threads=n, length=length, in_int8=True) for n in (1, 4))
    whole = one.run(text, lambda: length)
    many.step([(text, 0, 0, 1020)])
    for first in (*range(1020, 1030), 1030):
        count = 1 if first < 1030 else length - first
        assert same_bits(many.step([(text, 0, first, count)])[0], whole[first : first + count]), first


def test_a_stranger_full_of_nan_spoils_only_itself_and_leaves_nothing():
    layer, text = Layer(PLAIN, in_int8=True), Text.made(PLAIN)
    (clean,) = layer.step([(text, 0, 0, 50)])
    bad = Text.made(PLAIN, seed=1)
    bad.key[:, 3, 0] = bad.value[:, 9, 1] = torch.nan
    spoilt, beside = layer.step([(bad, 3, 0, 50), (text, 0, 0, 50)])
    assert spoilt[9:].isnan().all()
    assert same_bits(beside, clean)
    assert same_bits(layer.step([(text, 3, 0, 50)])[0], clean)


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_what_strangers_left_in_the_blocks_is_never_felt(block_size):
    text = Text.made(SINKS)
    clean = Layer(SINKS, in_int8=True).run(text, lambda: 7)
    layer = Layer(SINKS, block_size=block_size, in_int8=True)
    for pages in layer.cache._layers:
        pages.pages.fill_(SPOILT)
    assert same_bits(layer.run(text, lambda: 7), clean)


def test_a_fork_goes_on_from_a_copy_of_a_part_of_a_block():
    """Scales are copied with what they belong to, and cleared behind it."""
    layer, text = Layer(LATENT, in_int8=True), Text.made(LATENT)
    for pages in layer.cache._layers:
        pages.pages.fill_(SPOILT)
    whole = layer.run(text, lambda: LENGTH)
    shared, tail = divmod(100, 16)
    targets = layer.blocks(1, shared + 1)
    copies = tuple(
        BlockCopy(source=source, destination=target, num_tokens=16 if index < shared else tail)
        for index, (source, target) in enumerate(zip(layer.blocks(0, shared + 1), targets, strict=True))
    )
    (forked,) = layer.step([(text, 1, 100, 50)], copies)
    assert same_bits(forked, whole[100:])


# --- whole models ---


class Int8Reference(Reference):
    """Rounds keys and values as a cache in int8 does."""

    def _kept(self, x: Tensor) -> Tensor:
        return decoded(*encoded(x)).to(x.dtype)


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt_oss"])
def test_a_model_is_that_whose_keys_and_values_are_rounded(model):
    """In float32, so that hardly anything else is: but for numbers that lie between two codes."""
    layout, ids = layout_of(model, F32), tokens(100)
    runner = Runner(layout, in_int8=True)
    found = runner.run(ids, (40,)).double()
    runner.close()
    exact, rounded = (
        kind(layout, dtype=torch.float64).run_model(torch.tensor(ids)) for kind in (Reference, Int8Reference)
    )
    error, cost = (x.square().mean(1).sqrt().median() for x in (found - rounded, found - exact))
    assert 0 < error < 0.1 * cost


MODELS = pytest.mark.parametrize("case", [("llama", (("head_dim", 80),)), ("gpt_oss", ())], ids=["llama", "gpt_oss"])


@MODELS
def test_chunks_blocks_and_threads_have_the_same_bits(case):
    layout, ids = layout_of(case[0], BF16, case[1]), tokens(150)
    one_piece = alone(layout, ids, name="avx2", in_int8=True)
    for chunks, block_size, threads in (((1,), 32, 1), ((7, 1), 64, 1), ((64, 2), 48, 3), ((33,), 16, 2)):
        runner = Runner(layout, block_size=block_size, threads=threads, in_int8=True)
        runner.fill(torch.nan)
        assert same_bits(runner.run(ids, chunks), one_piece), (chunks, block_size, threads)
        runner.close()


@pytest.mark.parametrize("name", [name for name in ALL if name != "avx2"])
@MODELS
def test_instruction_classes_have_the_same_bits(case, name):
    library_or_skip(name)
    layout, ids = layout_of(case[0], BF16, case[1]), tokens(150)
    one_piece = alone(layout, ids, name="avx2", in_int8=True)
    runner = Runner(layout, name=name, block_size=16, in_int8=True)
    for chunks in ((), (5, 1, 40)):
        assert same_bits(runner.run(ids, chunks), one_piece), chunks
    runner.close()


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "avx2"])
def test_instruction_classes_have_the_same_bits_in_the_plain_dtypes(name, dtype):
    library_or_skip(name)
    layout, ids = layout_of("gemma2", dtype), tokens(100)
    assert same_bits(alone(layout, ids, name=name, in_int8=True), alone(layout, ids, name="avx2", in_int8=True))


def test_a_step_of_many_sequences():
    layout = layout_of("gpt_oss")
    sequences = [tokens(length, seed=length) for length in (1, 16, 17, 33, 64, 90)]
    runner = Runner(layout, threads=2, block_size=16, num_blocks=64, in_int8=True)
    runner.fill(torch.nan)
    for ids, logits in zip(sequences, together(runner, sequences, [0, 1, 2, 0, 3, 1]), strict=True):
        assert same_bits(logits, alone(layout, ids, in_int8=True)), len(ids)
    runner.close()


def test_a_copied_block_is_as_if_computed():
    layout, ids = layout_of("gpt_oss"), tokens(60)
    for shared in (1, 17, 33):
        other = [*ids[:shared], *tokens(30, seed=shared)]
        runner = Runner(layout, in_int8=True)
        runner.fill(torch.nan)
        first = runner.blocks(len(ids))
        runner.run(ids, (), first)
        whole = shared // 32
        second = [*first[:whole], *runner.blocks(len(other))]
        copy = BlockCopy(source=first[whole], destination=second[whole], num_tokens=shared % 32)
        (rest,) = runner.step(Part(shared, other[shared:], second), copies=[copy])
        runner.close()
        assert same_bits(rest, alone(layout, other, in_int8=True)[shared:]), shared


# --- the proof at load ---


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_this_machine_stores_and_reads_what_it_should(dtype):
    assert int8_difference([GROUPED, LATENT, SPECS["short keys"]], dtype, library_or_skip()) is None


@pytest.mark.parametrize(("place", "name"), [(0, "keys"), (1, "values")])
def test_a_machine_that_stores_another_bit_is_refused(monkeypatch, place, name):
    def wrong(cache, layer):
        found = kept_rows(cache, layer)
        found[place][0][0, 0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(int8_proof, "kept_rows", wrong)
    assert int8_difference([PLAIN], F32, library_or_skip()).startswith(f"{name} in int8, of a layer with 2 KV heads")


def test_a_machine_that_reads_another_bit_is_refused(monkeypatch):
    attend = LayerAttention.attend

    def wrong(self, *arguments):
        out = attend(self, *arguments)
        out[-1, 0, 0] += out[-1, 0, 0].abs() * 1e-5 * self._cache.in_int8
        return out

    monkeypatch.setattr(LayerAttention, "attend", wrong)
    assert int8_difference([PLAIN], F32, library_or_skip()).startswith("scores in int8")
