"""Adapters on the GPU executor, interpreted: equal to merged weights, and a row's bits are its own in any company."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.adapter_folder import read_adapter
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu import runs
from tests.worker.executors.gpu.tape import TapingDevice
from tests.worker.executors.in_pieces import InPieces
from tests.worker.executors.steps import Part, batch_of
from tests.worker.models.adapter_folders import TABLES, merge, places_of, save_adapter
from tests.worker.models.layouts import stated

NUM_SLOTS = 4
IDS = tokens(20)
SLOTS = [1, 0, 2, 3, 2]
"""Of the sequences of a step, whose neighbours have other adapters."""


def packed_in(executor, places, folder):
    read = places.named(read_adapter("a", str(folder)))
    return executor.pack_adapter(executor.plan_adapter(places.apply(read)), read.content)


@dataclass
class Adapted(InPieces, runs.Runner):
    """A runner whose sequences have the adapters of their slots."""

    ids = IDS

    max_positions: int = 128

    def put(self, base: Path, *folders: Path) -> "Adapted":
        self.executor.allocate_adapters(NUM_SLOTS)
        places = places_of(base, self.group)
        for slot, folder in enumerate(folders, 1):
            self.executor.put_adapter(slot, packed_in(self.executor, places, folder))
        return self

    def with_slots(self, slots, *parts: Part):
        """The logits of all tokens, by sequence, each with the adapter of its slot; none on ranks that do not lead."""
        batch = replace(batch_of(parts, self.block_size), adapter_slots=np.array(slots, dtype=np.int64))
        logits = self.executor.run(batch, with_logits=True).logits
        if logits is None:
            return []
        return list(logits.clone().split([len(part.token_ids) for part in parts]))


def adapted(layout, **more):
    return Adapted(layout, **{"launch": launch, **more})


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma2", "cohere", "gpt_neox", "phi3"))],
)
def test_equal_to_the_merged_model_in_float32(tmp_path, family):
    """Of gemma2 and cohere, logits and embeddings have a scale or a softcap."""
    base = save_tiny_model(family, tmp_path / "base")
    tables = () if family.startswith("gpt") else TABLES
    adapter = save_adapter(base, tmp_path / "adapter", tables=tables)
    whole = adapted(stated(merge(base, adapter, tmp_path / "merged"), dtype="float32"))
    runner = adapted(stated(base, dtype="float32")).put(base, adapter)
    found, expected, plain = runner.alone(1), whole.run(IDS), runner.alone(0)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max(), "the adapter changes something"
    assert torch.equal(plain, adapted(stated(base, dtype="float32")).run(IDS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model and three adapters, of different ranks and targets."""
    root = tmp_path_factory.mktemp("adapters")
    base = save_tiny_model("gemma2", root / "base", num_attention_heads=8, num_key_value_heads=4)
    adapters = (
        save_adapter(base, root / "one", seed=1),
        save_adapter(base, root / "two", seed=2, rank=33, use_rslora=True),
        save_adapter(base, root / "three", seed=3, rank=4, targets=("q_proj", "v_proj"), tables=TABLES),
    )
    return base, adapters


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_alone_in_company_and_in_chunks(tiny, dtype):
    base, adapters = tiny
    runner = adapted(stated(base, dtype=dtype)).put(base, *adapters)
    others = [tokens(12, seed=seed) for seed in range(len(SLOTS))]
    blocks = [runner.blocks(len(ids)) for ids in others]
    together = [[] for _ in others]
    for first, end in ((0, 9), (9, 10), (10, 12)):
        parts = [Part(first, ids[first:end], own) for ids, own in zip(others, blocks, strict=True)]
        for kept, some in zip(together, runner.with_slots(SLOTS, *parts), strict=True):
            kept.append(some)
    for slot, ids, rows in zip(SLOTS, others, together, strict=True):
        assert torch.equal(torch.cat(rows), runner.alone(slot, ids))
    assert torch.equal(adapted(stated(base, dtype=dtype)).run(others[1]), torch.cat(together[1]))


@pytest.mark.slow
def test_rows_of_one_adapter_have_the_same_bits_in_wide_tiles(tiny):
    base, adapters = tiny
    runner = adapted(stated(base, dtype="bfloat16")).put(base, *adapters)
    ids = tokens(70)
    whole = runner.alone(2, ids)
    assert torch.equal(whole, runner.alone(2, ids, chunks=(33, 30, 7)))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_bits_of_one(tiny, size):
    base, adapters = tiny
    ids = tokens(6)

    def logits_of(group):
        runner = adapted(stated(base, group, "bfloat16"), group=group).put(base, *adapters)
        parts = [Part(0, ids, runner.blocks(len(ids))) for _ in SLOTS]
        return runner.with_slots(SLOTS, *parts)

    (expected,) = run_ranks(1, logits_of)
    found = run_ranks(size, logits_of, timeout_s=300)
    assert torch.equal(torch.cat(found[0]), torch.cat(expected))
    assert found[1:] == [[]] * (size - 1)


def last_tokens(runner, slots):
    """A step that decodes, each sequence's first token."""
    return replace(
        batch_of([Part(0, [5 + row], runner.blocks(1)) for row in range(len(slots))], runner.block_size),
        adapter_slots=np.array(slots, dtype=np.int64),
    )


def test_graphs_stay_valid_when_adapters_are_put_and_replaced(tiny):
    """What is taped once reads the slots anew; steps without adapters have graphs of their own."""
    base, (one, two, three) = tiny
    layout, device = stated(base, dtype="bfloat16"), TapingDevice(launch)
    runner = adapted(layout, launch=device.launch, capture=device.capture).put(base, two, three)
    plain = adapted(layout).put(base, one, two, three)
    places = places_of(base)

    def logits(slots):
        return runner.executor.run(last_tokens(runner, slots), with_logits=True).logits.clone()

    def eager(slots):
        return plain.executor.run(last_tokens(plain, slots), with_logits=True).logits.clone()

    assert torch.equal(logits([1, 0, 2]), eager([2, 0, 3]))
    assert torch.equal(logits([2, 1, 0]), eager([3, 2, 0]))
    assert len(device.tapes) == 1
    runner.executor.put_adapter(1, packed_in(runner.executor, places, one))  # fewer ranks, no new linear
    runner.executor.put_adapter(3, packed_in(runner.executor, places, two))
    assert torch.equal(logits([1, 0, 3]), eager([1, 0, 2]))
    assert len(device.tapes) == 1, "it is the same graph"
    assert torch.equal(logits([0, 0, 0]), eager([0, 0, 0]))
    assert len(device.tapes) == 2
    assert device.tapes[1].names["launch"] == device.tapes[0].names["launch"] - extra_launches(layout)
    runner.executor.put_adapter(1, None)
    with pytest.raises(AssertionError, match="in their slots"):
        logits([1, 0, 3])


def extra_launches(layout):
    """Two for each linear and for the embedding, two groupings, and the head's softcap."""
    return 2 * (4 * len(layout.layers) + 2) + 2 + 1


@pytest.mark.slow
def test_graphs_are_captured_anew_for_more_linears_and_more_ranks(tiny):
    base, (one, two, three) = tiny
    layout, device = stated(base, dtype="bfloat16"), TapingDevice(launch)
    runner = adapted(layout, launch=device.launch, capture=device.capture).put(base, three)
    plain = adapted(layout).put(base, three, one, two)
    for slot, folder in ((2, one), (3, two)):
        runner.executor.run(last_tokens(runner, [1]), with_logits=True)
        runner.executor.run(last_tokens(runner, [0]), with_logits=True)
        before = len(device.tapes)
        runner.executor.put_adapter(slot, packed_in(runner.executor, places_of(base), folder))
        found = runner.executor.run(last_tokens(runner, [slot]), with_logits=True).logits.clone()
        assert torch.equal(found, plain.executor.run(last_tokens(plain, [slot]), with_logits=True).logits)
        runner.executor.run(last_tokens(runner, [0]), with_logits=True)
        assert len(device.tapes) == before + 1, "those of steps without adapters stay"


def test_steps_without_adapters_launch_what_a_server_without_lora_does(tiny):
    base, adapters = tiny
    counts = []
    for folders in ((), adapters):
        device = TapingDevice(launch)
        runner = adapted(stated(base, dtype="bfloat16"), launch=device.launch, capture=device.capture)
        if folders:
            runner.put(base, *folders)
        runner.executor.run(last_tokens(runner, [0, 0]), with_logits=True)
        counts.append(device.tapes[0].names)
    assert counts[0] == counts[1]


def proved(base, folder, dtype="float32", group=None, spoil=None):
    """Whether an adapter has an effect, by its proof; `spoil` changes what is packed."""
    runner = adapted(stated(base, group, dtype), **({} if group is None else {"group": group}))
    places = places_of(base, group)
    read = places.named(read_adapter("a", str(folder)))
    packed = runner.executor.pack_adapter(runner.executor.plan_adapter(places.apply(read)), read.content)
    assert places.prove(read, packed.differences, getattr(torch, dtype))
    if spoil is not None:
        spoil(packed)
    return places.prove(read, packed.compare(read.content), getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_proved_at_load(tiny, dtype):
    base, (_, two, three) = tiny
    assert proved(base, two, dtype)
    assert proved(base, three, dtype)


def test_ranks_prove_their_shares(tiny):
    base, (_, two, three) = tiny
    assert all(run_ranks(2, lambda group: proved(base, two, "bfloat16", group), timeout_s=300))
    assert all(run_ranks(4, lambda group: proved(base, three, "bfloat16", group), timeout_s=300))


def _scaled(packed):
    packed.scales *= 1.001


def _swapped(packed):
    packed.records[[0, 4], 1] = packed.records[[4, 0], 1]


def _shifted(packed):
    packed.records[2, 0] += 64


def _left_out(packed):
    packed.records[1] = 0


@pytest.mark.parametrize("spoil", [_scaled, _swapped, _shifted, _left_out])
def test_a_planted_mistake_is_refused_by_name(tiny, spoil):
    base, adapters = tiny
    with pytest.raises(ConfigurationError, match=r"adapter a in .*layers\.\d.*is not the product of its matrices"):
        proved(base, adapters[0], spoil=spoil)


def test_planted_in_a_step_a_neighbours_slot_and_a_stale_one_change_the_bits(tiny):
    """So the tests above can fail."""
    base, (one, two, three) = tiny
    runner = adapted(stated(base, dtype="bfloat16")).put(base, one, two, three)
    ids = IDS[:4]
    assert not torch.equal(runner.alone(1, ids), runner.alone(2, ids))
    put = packed_in(runner.executor, places_of(base), two)
    runner.executor.put_adapter(1, put)
    assert torch.equal(runner.alone(1, ids), runner.alone(2, ids)), "it has been replaced"
    put.scales *= 1.5
    assert not torch.equal(runner.alone(1, ids), runner.alone(2, ids))


def test_experts_are_refused_by_name(tmp_path):
    base = save_tiny_model("mixtral", tmp_path / "base")
    runner, places = adapted(stated(base, dtype="bfloat16")), places_of(base)
    attention = save_adapter(base, tmp_path / "attention", targets=("q_proj", "o_proj"))
    router = save_adapter(base, tmp_path / "router", targets=("gate",))
    packed_in(runner.executor, places, attention)
    with pytest.raises(ConfigurationError, match=r"router of layer 0: on GPUs, adapters of attention"):
        packed_in(runner.executor, places, router)
