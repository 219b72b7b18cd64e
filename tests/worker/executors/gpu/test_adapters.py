"""Adapters on the GPU executor, interpreted: equal to merged weights, and a row's bits are its own in any company."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.models.adapter_folder import read_adapter
from tests.parity.families import save_tiny_model
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.gpu import runs
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
class Adapted(runs.Runner):
    """A runner whose sequences have the adapters of their slots."""

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

    def alone(self, slot, ids=IDS, chunks=()):
        blocks, rows, first, turn = self.blocks(len(ids)), [], 0, 0
        while first < len(ids):
            size = chunks[turn % len(chunks)] if chunks else len(ids)
            rows += self.with_slots([slot], Part(first, ids[first : first + size], blocks))
            first, turn = first + size, turn + 1
        return torch.cat(rows)


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


def test_rows_of_one_adapter_have_the_same_bits_in_wide_tiles(tiny):
    base, adapters = tiny
    runner = adapted(stated(base, dtype="bfloat16")).put(base, *adapters)
    ids = tokens(70)
    whole = runner.alone(2, ids)
    assert torch.equal(whole, runner.alone(2, ids, chunks=(33, 30, 7)))
