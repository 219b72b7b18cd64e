"""Adapters on the native executor: equal to merged weights, and a row's bits are its own, whatever is beside it."""

import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.adapter_folder import read_adapter
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.hybrids import save_hybrid
from tests.worker.executors.cpu.native import library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import Runner, tokens
from tests.worker.executors.in_pieces import InPieces
from tests.worker.executors.steps import Part, batch_of
from tests.worker.models.adapter_folders import TABLES, merge, places_of, save_adapter
from tests.worker.models.layouts import stated

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "cohere",
    "olmo2",
    "starcoder2",
    "mistral",
    "qwen2_moe",
    "mixtral",
    "deepseek_v3",
)
LATENT = "deepseek_v3"
EXPERTS = ("gate_up_proj", "down_proj")
IDS = tokens(50)
NUM_STATES = 8


def packed_in(executor, places, folder):
    read = places.named(read_adapter("a", str(folder)))
    return executor.pack_adapter(executor.plan_adapter(places.apply(read)), read.content)


def adapted(batch, slots, **changes):
    """A step whose sequences have adapters by their slots, and states by their number."""
    own = np.array(slots, dtype=np.int64)
    states = {"state_slots": np.arange(len(own)), "num_drafts": np.zeros(len(own), dtype=np.int64)}
    return replace(batch, adapter_slots=own, **states, **changes)


class Adapted(InPieces, Runner):
    """A runner whose sequences have the adapters of their slots, and states by their number in a step."""

    ids = IDS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.executor.allocate_states(NUM_STATES, 0)

    def put(self, base: Path, *folders: Path) -> "Adapted":
        places = places_of(base)
        for slot, folder in enumerate(folders, 1):
            self.executor.put_adapter(slot, packed_in(self.executor, places, folder))
        return self

    def with_slots(self, slots, *parts: Part):
        """The logits of all tokens, by sequence, each with the adapter of its slot."""
        output = self.executor.run(adapted(batch_of(parts, self.block_size), slots), with_logits=True)
        return list(output.logits.clone().split([len(part.token_ids) for part in parts]))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_merged_model_in_float32(tmp_path, family):
    base = save_tiny_model(family, tmp_path / "base")
    tables = TABLES if FAMILIES.index(family) % 2 and not family.startswith("gpt") else ()
    adapter = save_adapter(base, tmp_path / "adapter", tables=tables)
    merged = merge(base, adapter, tmp_path / "merged")
    runner = Adapted(stated(base, dtype="float32")).put(base, adapter)
    whole = Adapted(stated(merged, dtype="float32"))
    found, expected, plain = runner.alone(1), whole.alone(0), runner.alone(0)
    runner.close(), whole.close()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max(), "the adapter changes something"


@cache
def _tiny(root: Path, family: str):
    """A model and three adapters, of different ranks and targets."""
    if family == "hybrid":
        base = save_hybrid(root / "base", "mixture", num_key_value_heads=4)
    else:
        kv_heads = 8 if family == LATENT else 4
        base = save_tiny_model(family, root / "base", num_attention_heads=8, num_key_value_heads=kv_heads)
    stacks = EXPERTS if family != "llama" else ()
    few = ("q_b_proj", "kv_b_proj") if family == LATENT else ("q_proj", "v_proj")
    return base, (
        save_adapter(base, root / "one", seed=1),
        save_adapter(
            base, root / "two", seed=2, rank=33, use_rslora=True, targets=few if stacks else None, stacks=stacks
        ),
        save_adapter(base, root / "three", seed=3, rank=4, targets=few, tables=TABLES, stacks=stacks[1:]),
    )


@pytest.fixture(scope="module", params=["llama", "qwen2_moe", "hybrid", LATENT])
def each(request, tmp_path_factory):
    return _tiny(tmp_path_factory.mktemp("adapters"), request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return _tiny(tmp_path_factory.mktemp("adapters"), "llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_in_company_and_in_chunks(each, dtype):
    base, adapters = each
    runner = Adapted(stated(base, dtype=dtype), threads=2, num_blocks=128).put(base, *adapters)
    others = [tokens(70, seed=seed) for seed in range(8)]
    slots = [1, 0, 2, 3, 2, 0, 1, 3]
    together = [[] for _ in others]
    blocks = [runner.blocks(len(ids)) for ids in others]
    for first, end in ((0, 40), (40, 41), (41, 43), (43, 70)):
        rows = runner.with_slots(
            slots, *(Part(first, ids[first:end], own) for ids, own in zip(others, blocks, strict=True))
        )
        for kept, some in zip(together, rows, strict=True):
            kept.append(some)
    for slot, ids, rows in zip(slots, others, together, strict=True):
        assert same_bits(torch.cat(rows), runner.alone(slot, ids))
        runner.free = list(range(64))
    assert same_bits(runner.alone(2, chunks=(1, 7)), runner.alone(2))
    plain = Adapted(stated(base, dtype=dtype), threads=2)
    assert same_bits(plain.alone(0, others[1]), torch.cat(together[1])), "rows without an adapter keep their bits"
    runner.close(), plain.close()


def test_groups_that_threads_share_unevenly(tmp_path):
    """Seven groups of an MLP's inner outputs: none is left out, whichever thread takes it."""
    base = save_tiny_model("llama", tmp_path / "base", intermediate_size=7 * 32)
    adapter = save_adapter(base, tmp_path / "adapter")
    found = []
    for threads in (1, 2, 3):
        runner = Adapted(stated(base, dtype="bfloat16"), threads=threads).put(base, adapter)
        found.append(runner.alone(1, chunks=(1, 30)))
        runner.close()
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_the_wanted_rows_alone_and_several_steps(each):
    base, adapters = each
    runner = Adapted(stated(base, dtype="bfloat16"), num_blocks=64).put(base, *adapters)
    ids, slots = [tokens(40, seed=seed) for seed in range(3)], [3, 0, 1]
    parts = [Part(0, own, runner.blocks(len(own))) for own in ids]
    every = torch.cat(runner.with_slots(slots, *parts))
    batch = adapted(batch_of(parts, runner.block_size), slots, logits_rows=np.array([39, 70, 119]))
    some = runner.executor.run(batch, with_logits=True).logits
    assert same_bits(some, every[[39, 70, 119]])
    runner.close()


def test_instruction_classes(each):
    base, adapters = each
    for dtype in ("bfloat16", "float32"):
        expected = None
        for name in ("avx2", *other_classes(getattr(torch, dtype))):
            runner = Adapted(stated(base, dtype=dtype), name=name).put(base, *adapters)
            found = torch.cat([runner.alone(slot, chunks=(30, 1)) for slot in (1, 2, 3)])
            expected = found if expected is None else expected
            assert same_bits(found, expected), name
            runner.close()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_one(each, size):
    library_or_skip()
    base, adapters = each
    runner = Adapted(stated(base, dtype="bfloat16")).put(base, *adapters)
    parts = [Part(0, IDS, runner.blocks(len(IDS))) for _ in range(4)]
    batch = adapted(batch_of(parts, runner.block_size), [1, 0, 2, 3])
    expected = runner.executor.run(batch, with_logits=True).logits.clone()
    runner.close()

    def of_rank(group):
        executor = CpuExecutor(stated(base, group, "bfloat16"), group, max_positions=4096, threads=1)
        places = places_of(base, group)
        for slot, folder in enumerate(adapters, 1):
            executor.put_adapter(slot, packed_in(executor, places, folder))
        executor.allocate_cache(64, 32)
        executor.allocate_states(NUM_STATES, 0)
        found = executor.run(batch, with_logits=True).logits.clone()
        executor.close()
        return found

    assert same_bits(run_ranks(size, of_rank)[0], expected)


def proved(base, folder, dtype="float32", group=None, spoil=None):
    """Whether an adapter has an effect, by its proof; `spoil` changes what is packed."""
    executor = CpuExecutor(stated(base, group, dtype), group or SingleRank(), max_positions=4096, threads=1)
    places = places_of(base, group)
    read = places.named(read_adapter("a", str(folder)))
    packed = executor.pack_adapter(executor.plan_adapter(places.apply(read)), read.content)
    if spoil is not None:
        assert places.prove(read, packed.differences, getattr(torch, dtype))
        spoil(packed)
    try:
        return places.prove(read, packed.compare(read.content), getattr(torch, dtype))
    finally:
        executor.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_proved_at_load(tmp_path, family):
    library_or_skip()
    base = save_tiny_model(family, tmp_path / "base")
    dtype = ("float32", "bfloat16", "float16")[FAMILIES.index(family) % 3]
    assert proved(base, save_adapter(base, tmp_path / "adapter", rank=5, seed=3), dtype)


def test_ranks_prove_their_shares(each):
    library_or_skip()
    base, adapters = each
    assert all(run_ranks(4, lambda group: proved(base, adapters[1], "bfloat16", group)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rank", [5, 8, 16, 24])
def test_packed_alike_from_files_of_any_dtype(tiny, tmp_path, rank, dtype):
    """Rows of one dtype are not read as others are."""
    library_or_skip()
    base, _ = tiny
    executor = CpuExecutor(stated(base, dtype=dtype), SingleRank(), max_positions=64, threads=1)
    stored = {one: {"A": one, "B": one} for one in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
    stored["both"] = {"A": torch.float16, "B": torch.float64}
    found = set()
    for name, by_part in stored.items():
        folder = save_adapter(base, tmp_path / str(name), rank=rank, change=partial(_store, by_part))
        packed = packed_in(executor, places := places_of(base), folder)
        assert places.prove(places.named(read_adapter("a", str(folder))), packed.differences, executor.dtype)
        found.add(bytes(packed.memory)[: packed.num_bytes])
    executor.close()
    assert len(found) == 1


def _store(by_part, config, tensors):
    """Numbers that all dtypes have."""
    for name, tensor in tensors.items():
        tensors[name] = (tensor * 128).round().clamp(-64, 64).div(128).to(by_part["A" if "lora_A" in name else "B"])


def test_a_nan_in_any_matrix_is_seen(each, tmp_path):
    """By the proof alone: nothing else looks at all numbers of an adapter without copies, on one rank."""
    library_or_skip()
    base, adapters = each
    executor = CpuExecutor(stated(base, dtype="bfloat16"), SingleRank(), max_positions=64, threads=1)
    places, draw = places_of(base), np.random.default_rng(1)
    for folder in adapters:
        shutil.copytree(folder, own := tmp_path / folder.name)
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in sorted(one for one in tensors if "lora_" in one):
            numbers = tensors[name].clone()
            numbers.view(torch.int32).view(-1)[draw.integers(numbers.numel())] = -1 if "_A" in name else 0x7F800001
            save_file({**tensors, name: numbers}, own / "adapter_model.safetensors")
            differences = packed_in(executor, places, own).differences.values()
            assert any(np.isnan(one.error) for of_parts in differences for one in of_parts), name
    executor.close()


def _scaled(packed):
    packed.scales *= 1.001


def _swapped(packed):
    packed.linears["b"][[0, 4]] = packed.linears["b"][[4, 0]]


def _shifted(packed):
    packed.linears["a"][2] += 64


def _left_out(packed):
    packed.linears["ranks"][1] = 0


@pytest.mark.parametrize("spoil", [_scaled, _swapped, _shifted, _left_out])
def test_a_planted_mistake_is_refused_by_name(tiny, spoil):
    library_or_skip()
    base, adapters = tiny
    with pytest.raises(ConfigurationError, match=r"adapter a in .*layers\.\d.*is not the product of its matrices"):
        proved(base, adapters[0], spoil=spoil)


def test_an_adapter_that_rounding_leaves_nothing_of(tiny, tmp_path):
    library_or_skip()
    base, _ = tiny
    fresh = save_adapter(base, tmp_path / "fresh", change=lambda _, tensors: times(tensors, "lora_B", 0))
    assert not proved(base, fresh, "float16"), "PEFT saves such adapters before they are trained"
    small = save_adapter(base, tmp_path / "small", change=lambda _, tensors: times(tensors, "lora_B", 1e-9))
    assert proved(base, small, "bfloat16")
    with pytest.raises(ConfigurationError, match=r"too small for the model's torch\.float16"):
        proved(base, small, "float16")


def times(tensors, part, factor):
    tensors.update({name: tensor * factor for name, tensor in tensors.items() if part in name})


def test_beside_quantized_weights(each, tmp_path):
    """What an adapter adds does not depend on how the base's weights are kept."""
    base, adapters = each
    layout = stated(base, dtype="bfloat16", quantization="int8", quantized_activations="int8")
    quantized = Adapted(layout).put(base, *adapters)
    plain = Adapted(stated(base, dtype="float32")).put(base, *adapters)
    for slot in (1, 2, 3):
        change = plain.alone(slot) - plain.alone(0)
        found = quantized.alone(slot) - quantized.alone(0)
        assert (found - change).norm() < 0.25 * change.norm()
    assert same_bits(quantized.alone(2), quantized.alone(2, chunks=(1, 20)))
    quantized.close(), plain.close()
