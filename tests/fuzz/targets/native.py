"""Native code at the executor's boundary: the sampler's draws and edits, and batches of prompts through a tiny model.

The bytes choose among calls that a scheduler can make; the code runs with sanitizers in the nightly
(`tests/fuzz/sanitized.py`). What comes back is compared with PyTorch's sampler, and with the same tokens in one piece.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from benchmarks.own_pool_sampler import OwnPoolSampler
from holdfast.worker.draws import DrawParams, LogitsSettings
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.step_plan import PromptLogprobParams
from tests.draw_params import draw_params
from tests.reference.step_sampler import TorchSampler
from tests.worker.executors.cpu.runs import Runner, layout_of
from tests.worker.executors.steps import Part

VOCABULARIES: Final = (2, 63, 64, 65, 129, 1000, 3001)
SCALES: Final = (0.0, 0.05, 1.0, 6.0, 60.0)
MODELS: Final = ("llama", "qwen3")
MAX_TOKENS: Final = 90


class Choices:
    """Numbers chosen by bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, count: int) -> int:
        """In 0 .. count - 1."""
        num_bytes = 1 if count <= 256 else 3
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return int.from_bytes(taken, "little") % count

    def one(self, items: Sequence) -> object:
        return items[self.number(len(items))]

    def ids(self, most: int, limit: int) -> tuple[int, ...]:
        return tuple(self.number(limit) for _ in range(self.number(most + 1)))


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte says whether the rest draws or computes."""
    sampler, torch_sampler = OwnPoolSampler.with_threads(2), TorchSampler()
    runners = [Runner(layout_of(model), threads=2, block_size=16) for model in MODELS]

    def read(data: bytes) -> None:
        choices = Choices(data)
        if choices.number(4):
            draw(sampler, torch_sampler, choices)
        else:
            compute(runners[choices.number(len(runners))], choices)

    try:
        yield read
    finally:
        sampler.close()
        for runner in runners:
            runner.executor.close()


def draw(sampler: NativeSampler, reference: TorchSampler, choices: Choices) -> None:
    """Draws the rows of a step, twice: the same from the same logits, and a token that may be drawn."""
    vocab, scale = choices.one(VOCABULARIES), choices.one(SCALES)
    num_rows = 1 + choices.number(8)
    generator = torch.Generator().manual_seed(choices.number(256))
    logits = torch.randn(num_rows, vocab, generator=generator) * scale
    draws = [_params(choices, vocab) for _ in range(num_rows)]
    masks = {
        row: _mask(choices, vocab)
        for row, params in enumerate(draws)
        if params.logits_settings is not None and params.logits_settings.grammar
    }
    prompts = [
        PromptLogprobParams(first_row=0, token_ids=(choices.number(vocab),), num_logprobs=choices.number(21))
        for _ in range(choices.number(2) * (num_rows > 1))
    ]
    draws = draws[: num_rows - len(prompts)]
    masks = {row: mask for row, mask in masks.items() if row < len(draws)}
    before = logits.clone()
    drawn = sampler.sample(HeadOutput(logits, None), draws, masks, prompts)
    assert drawn == sampler.sample(HeadOutput(logits, None), draws, masks, prompts), "a draw can be repeated"
    assert torch.equal(logits, before), "edits are undone"
    assert all(0 <= token < vocab for token in drawn.token_ids), drawn.token_ids
    wanted = reference.sample(HeadOutput(logits, None), draws, masks, prompts)
    assert drawn.token_ids == wanted.token_ids, (drawn.token_ids, wanted.token_ids)


def _params(choices: Choices, vocab: int) -> DrawParams:
    settings = _settings(choices, vocab) if choices.number(2) else None
    return draw_params(
        seed=choices.number(1 << 24) * 0x1_2345_6789 % 2**63,
        first_output_index=choices.number(256),
        temperature=choices.one((0.0, 0.02, 0.8, 1.0, 60.0)),
        top_k=choices.one((0, 1, 2, 20, 1500, 100_000)),
        top_p=choices.one((1.0, 0.95, 0.5, 0.02, 1e-6)),
        min_p=choices.one((0.0, 0.05, 0.5, 1.0)),
        logits_settings=settings,
        output_token_ids=choices.ids(20, vocab + 3) if settings is not None else (),
        num_logprobs=choices.one((None, 0, 1, 20)),
    )


def _settings(choices: Choices, vocab: int) -> LogitsSettings:
    """Ids may be beyond the vocabulary, and below 0."""
    beyond = vocab + 3
    allowed = choices.ids(6, beyond)
    return LogitsSettings(
        allowed_token_ids=array("q", [token - 1 for token in allowed]) if allowed else None,
        bad_words=tuple(choices.ids(2, vocab) or (0,) for _ in range(choices.number(3))),
        min_tokens=choices.number(40),
        end_token_ids=choices.ids(3, beyond),
        grammar="x" if choices.number(2) else "",
        logit_bias=tuple((token, choices.one((-100.0, 9.5, 0.0))) for token in sorted(set(choices.ids(5, beyond)))),
        repetition_penalty=choices.one((1.0, 0.5, 1.7)),
        frequency_penalty=choices.one((0.0, -1.0, 1.9)),
        presence_penalty=choices.one((0.0, -0.5, 1.5)),
        prompt_token_ids=array("q", sorted(set(choices.ids(9, beyond)))),
    )


def _mask(choices: Choices, vocab: int) -> bytes:
    """Of as many tokens as the vocabulary has, or of fewer; at least one is allowed."""
    bits = np.array([choices.number(3) == 0 for _ in range(min(vocab, 64))], dtype=bool)
    bits = np.resize(bits, vocab - min(choices.number(6), vocab - 1))
    bits[0] = True
    return np.packbits(bits, bitorder="little").tobytes()


def compute(runner: Runner, choices: Choices) -> None:
    """A sequence in chunks beside others gives the logits that it has alone."""
    num_tokens = 1 + choices.number(MAX_TOKENS)
    token_ids = [3 + choices.number(120) for _ in range(num_tokens)]
    alone = runner.blocks(num_tokens)
    whole = runner.step(Part(0, token_ids, alone))[0]
    mine, other = runner.blocks(num_tokens), runner.blocks(num_tokens)
    rows, first = [], 0
    while first < num_tokens:
        size = min(1 + choices.number(40), num_tokens - first)
        parts = [Part(first, token_ids[first : first + size], mine)]
        if choices.number(2):
            parts.append(Part(0, token_ids[: 1 + choices.number(min(size, 20))], other))
        if len(parts) > 1 and choices.number(2):
            parts.reverse()
        rows.append(runner.step(*parts)[next(at for at, part in enumerate(parts) if part.blocks is mine)])
        first += size
    runner.free = [*runner.free, *alone, *mine, *other]
    assert torch.equal(torch.cat(rows), whole), "a row does not depend on its neighbours"
