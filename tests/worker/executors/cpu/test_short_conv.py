"""The bits of a short convolution are the same in every instruction class, chunk and number of threads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.stated_layout import read_stated
from holdfast.worker.step_plan import ScheduledSequence, StepPlan
from tests.parity.hybrids import save_hybrid
from tests.worker.executors.cpu.native import BF16, F16, F32, library_or_skip, other_classes, same_bits
from tests.worker.executors.cpu.runs import tokens

IDS = tokens(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("model"), "odd channels")


def layout_in(folder: Path, dtype: torch.dtype) -> DecoderLayout:
    name = str(dtype).removeprefix("torch.")
    read = read_stated(ModelConfig(model=str(folder), dtype=name), folder, SingleRank())
    assert not isinstance(read, str), read
    return read[0]


def run(layout: DecoderLayout, name: str, chunks: tuple[int, ...] = (len(IDS),), threads: int = 1) -> Tensor:
    """The logits of a sequence, whose slot another one has left full of NaN."""
    library_or_skip(name)
    executor = CpuExecutor(layout, SingleRank(), max_positions=128, threads=threads, instruction_class=name)
    executor.allocate_cache(8, 16)
    executor.allocate_states(2, 3)
    assert executor._states is not None
    for pool in executor._states.pools:
        pool.fill_(torch.nan)
    rows, first = [], 0
    for turn in range(len(IDS)):
        some = IDS[first : first + chunks[turn % len(chunks)]]
        if not some:
            break
        rows.append(executor.run(batch_of(first, some), with_logits=True).logits.clone())
        first += len(some)
    executor.close()
    return torch.cat(rows)


def batch_of(first: int, token_ids: list[int]) -> StepBatch:
    share = ScheduledSequence(
        sequence_id=0,
        first_position=first,
        token_ids=tuple(token_ids),
        block_ids=tuple(range(-(-(first + len(token_ids)) // 16))),
        draw=None,
        num_draws=len(token_ids),
        state_slot=1,
    )
    return StepBatch.of(StepPlan(step_id=0, others=(share,)))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_instruction_classes_chunks_and_threads(dtype, folder):
    layout = layout_in(folder, dtype)
    expected = run(layout, "avx2")
    assert expected.isfinite().all()
    assert same_bits(run(layout, "avx2", (1, 7, 40), threads=3), expected)
    for name in other_classes(dtype):
        assert same_bits(run(layout, name), expected), name
        assert same_bits(run(layout, name, (5, 1, 64), threads=2), expected), name
