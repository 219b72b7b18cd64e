"""Tiny models on the HF backend, on a GPU or with Triton's interpreter in its place, and what they must give."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.worker.executors.gpu.graphs import Capture
from holdfast.worker.executors.gpu.launches import Launch, triton_launch
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.hf_device_backend import HfDeviceBackend
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallel_plan import ParallelPlan
from holdfast.worker.models.parallelize import Target, parallelize
from holdfast.worker.models.weights import ATTENTION, loaded_weights
from tests.worker.executors.cpu.runs import tokens
from tests.worker.executors.models import config_of, expected_logits, hugging_face
from tests.worker.executors.steps import Part, batch_of

BLOCK, LENGTH = 16, 128


def module_of(family: str, target: Target) -> Any:
    """A tiny model's tree on the target's device."""
    module = hugging_face(config_of(family), ATTENTION, target.dtype)
    parallelize(module, ParallelPlan(module.config, module.tp_plan or {}, target.group.size), loaded_weights, target)
    return module


@dataclass
class Served:
    """A tiny model on an HF backend, with a cache full of other sequences' rests."""

    family: str
    graphs: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: Launch = triton_launch
    capture: Capture | None = None
    """Unset: torch's, on a GPU."""
    free: list[int] = field(default_factory=lambda: [*range(0, 40, 2), *range(1, 40, 2)])

    def __post_init__(self) -> None:
        target = Target(group=SingleRank(), device=self.device, dtype=torch.float32)
        model = RankModel(module_of(self.family, target), target)
        device = HfDeviceBackend(model, target, max_positions=LENGTH, launch=self.launch, capture=self.capture)
        if not self.graphs:
            device._capture = None
        model.settle(device.linear)
        self.backend = HfBackend(model, target, device)
        self.cache = self.backend.allocate_cache(40, BLOCK)
        for layer in self.cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK))]

    def step(self, *parts: Part) -> list[Tensor]:
        """The logits of all tokens, by sequence."""
        logits = self.backend.run(batch_of(parts, BLOCK), with_logits=True).logits
        assert logits is not None
        return list(logits.clone().cpu().split([len(part.token_ids) for part in parts]))

    def run(self, ids: list[int], chunks: Sequence[int]) -> Tensor:
        """The logits of a sequence, alone in its steps."""
        blocks, rows, first = self.blocks(len(ids)), list[Tensor](), 0
        for size in chunks:
            rows += self.step(Part(first, ids[first : first + size], blocks))
            first += size
        assert first == len(ids)
        return torch.cat(rows)


def check_family(alone: Served, together: Served) -> None:
    """Three sequences packed; then each decodes, padded to a graph's rows; beside one that is `alone`, in chunks.

    Greedy tokens are those of Hugging Face; a row's bits are its own.
    """
    assert alone.backend.numerics == together.backend.numerics == "hf-4-triton-1"
    together.backend.warm_up(4)
    prompts = [tokens(count, seed) for seed, count in enumerate((9, 17, 4))]
    blocks = [together.blocks(len(ids) + 4) for ids in prompts]
    logits = together.step(*(Part(0, ids, table) for ids, table in zip(prompts, blocks, strict=True)))
    rows = [[some] for some in logits]
    texts = [[*ids, int(some[-1].argmax())] for ids, some in zip(prompts, logits, strict=True)]
    for _ in range(2):
        parts = [Part(len(text) - 1, text[-1:], table) for text, table in zip(texts, blocks, strict=True)]
        for text, row, some in zip(texts, rows, together.step(*parts), strict=True):
            row.append(some)
            text.append(int(some.argmax()))
    longest = max(texts, key=len)
    for ids, text, row in zip(prompts, texts, rows, strict=True):
        ours = torch.cat(row)
        theirs = expected_logits(config_of(alone.family), torch.tensor(text[:-1]))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        assert text[len(ids) :] == theirs.argmax(-1)[len(ids) - 1 :].tolist()
        if text is longest:
            assert torch.equal(alone.run(text[:-1], (len(text) - 5, 3, 1)), ours)
