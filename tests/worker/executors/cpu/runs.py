"""The native executor on tiny models: sequences that go through steps in chunks, with their blocks anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.step_plan import BlockCopy
from tests.worker.executors import models
from tests.worker.executors.cpu.native import BF16, library_or_skip
from tests.worker.executors.models import config_of
from tests.worker.executors.steps import Part, batch_of

MAX_POSITIONS = 4096
SPOILT = 0x7E
"""Two such bytes are a float16 that is NaN."""


@cache
def layout_of(model: str, dtype: torch.dtype = BF16, changes: tuple[tuple[str, Any], ...] = ()) -> DecoderLayout:
    """A tiny model's layout; `changes` are of its config."""
    config = config_of(model, **{"max_position_embeddings": MAX_POSITIONS, **dict(changes)})
    return models.layout_of(config, dtype=dtype)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 126, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Runner:
    """An executor with a cache. Blocks are given out backwards and with gaps, so that none follows its neighbour."""

    layout: DecoderLayout
    name: str | None = None
    threads: int = 1
    block_size: int = 32
    num_blocks: int = 64
    compacts: bool | None = None
    in_int8: bool = False
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        library_or_skip(self.name)
        self.executor = CpuExecutor(
            self.layout,
            SingleRank(),
            max_positions=MAX_POSITIONS,
            threads=self.threads,
            instruction_class=self.name,
            compacts=self.compacts,
        )
        if self.in_int8:
            self.executor.keep_kv_in_code()
        self.cache = self.executor.allocate_cache(self.num_blocks, self.block_size)
        self.free = [*range(0, self.num_blocks, 2), *range(1, self.num_blocks, 2)]

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def fill(self, value: float) -> None:
        """Writes over the whole cache, as if other sequences had left it so; in int8, with scales that are NaN."""
        for layer in self.cache._layers:
            layer.pages.fill_(SPOILT if self.in_int8 else value)

    def step(self, *parts: Part, copies: Sequence[BlockCopy] = ()) -> list[Tensor]:
        """The logits of all tokens, by sequence."""
        output = self.executor.run(batch_of(parts, self.block_size, copies), with_logits=True)
        return list(output.logits.clone().split([len(part.token_ids) for part in parts]))

    def head(self, *parts: Part) -> HeadOutput:
        """All that the head tells of the tokens; the next step writes over it."""
        return self.executor.run(replace(batch_of(parts, self.block_size), with_masses=True), with_logits=True)

    def some(self, wanted: Sequence[int], *parts: Part) -> Tensor:
        """The logits of some rows of a step, in the order in which they are wanted."""
        batch = replace(batch_of(parts, self.block_size), logits_rows=np.array(wanted, dtype=np.int64))
        return self.executor.run(batch, with_logits=True).logits.clone()

    def chosen(self, token_ids: Sequence[int], blocks: Sequence[int], wanted: Sequence[int] | None = None) -> list[int]:
        """The token that the head chooses after each, or after those that are wanted."""
        batch = batch_of([Part(0, token_ids, blocks)], self.block_size)
        if wanted is not None:
            batch = replace(batch, logits_rows=np.array(wanted, dtype=np.int64))
        return list(self.executor.run(batch, with_logits=False).best)

    def run(self, token_ids: Sequence[int], chunks: Sequence[int] = (), blocks: Sequence[int] = ()) -> Tensor:
        """The logits of a sequence, alone in its steps: chunks of these sizes again and again, or in one piece."""
        blocks = blocks or self.blocks(len(token_ids))
        rows, first, turn = [], 0, 0
        while first < len(token_ids):
            size = chunks[turn % len(chunks)] if chunks else len(token_ids)
            rows += self.step(Part(first, token_ids[first : first + size], blocks))
            first, turn = first + size, turn + 1
        return torch.cat(rows)

    def close(self) -> None:
        self.executor.close()
