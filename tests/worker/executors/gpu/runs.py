"""The GPU executor on tiny models, on any device: sequences that go through steps in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from holdfast.worker.executors import kv_cache as fp8
from holdfast.worker.executors.gpu.executor import GpuExecutor
from holdfast.worker.executors.gpu.graphs import Capture
from holdfast.worker.executors.gpu.launches import Launch, triton_launch
from holdfast.worker.executors.gpu.rank_exchange import Share
from holdfast.worker.executors.kv_cache import LayerCache
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models.reference import Reference
from holdfast.worker.step_plan import BlockCopy
from tests.worker.executors.steps import Part, batch_of

MAX_POSITIONS = 4096


@dataclass
class Runner:
    """An executor with a cache full of other sequences' rests. Blocks are given out backwards and with gaps."""

    layout: DecoderLayout
    block_size: int = 32
    num_blocks: int = 64
    group: TensorParallelGroup = field(default_factory=SingleRank)
    capture: Capture | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: Launch = triton_launch
    share: Share | None = None
    max_positions: int = MAX_POSITIONS
    in_fp8: bool = False
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.executor = GpuExecutor(
            self.layout,
            self.group,
            max_positions=self.max_positions,
            device=self.device,
            max_rows=256,
            launch=self.launch,
            capture=self.capture,
            share=self.share,
        )
        if self.in_fp8:
            self.executor.keep_kv_in_code()
        self.cache = self.executor.allocate_cache(self.num_blocks, self.block_size)
        for layer in self.cache.layers:
            spoil(layer)
        self.free = [*range(0, self.num_blocks, 2), *range(1, self.num_blocks, 2)]

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def step(self, *parts: Part, copies: Sequence[BlockCopy] = ()) -> list[Tensor]:
        """The logits of all tokens, by sequence; none on ranks that do not lead."""
        output = self.executor.run(batch_of(parts, self.block_size, copies), with_logits=True)
        if output.logits is None:
            return [torch.empty(0)] * len(parts)
        return list(output.logits.clone().cpu().split([len(part.token_ids) for part in parts]))

    def best(self, *parts: Part) -> list[int]:
        """The token that the head chooses after each token."""
        return list(self.executor.run(batch_of(parts, self.block_size), with_logits=False).best)

    def run(self, token_ids: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
        """The logits of a sequence, alone in its steps: chunks of these sizes again and again, or in one piece."""
        blocks, rows, first, turn = self.blocks(len(token_ids)), [], 0, 0
        while first < len(token_ids):
            size = chunks[turn % len(chunks)] if chunks else len(token_ids)
            rows += self.step(Part(first, token_ids[first : first + size], blocks))
            first, turn = first + size, turn + 1
        return torch.cat(rows)


class Fp8Reference(Reference):
    """Rounds keys and values as a cache in fp8 does."""

    def _kept(self, x: Tensor) -> Tensor:
        dtype = self._layout.dtype
        return fp8.decoded(*fp8.encoded(x.to(dtype)), dtype).to(self._dtype)


def spoil(pages: LayerCache) -> None:
    """Fills pages with what no kernel may read."""
    for pool, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        pool.fill_(torch.nan if scales is None else 0x7F)
        if scales is not None:
            scales.fill_(fp8.BROKEN)
