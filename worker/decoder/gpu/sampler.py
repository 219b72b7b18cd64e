"""Sampler of a device: a step's tokens drawn where its logits are, to the native sampler's bits, with one wait.

What may live here: one step's way from parameters to what is read back, and its graphs. What may not: arithmetic
(`kernels/`), launches (`draw_launches.py`), edits as arrays (`edit_table.py`), and what the parameters mean
(`worker/sampling/`).
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.decoder.draw_records import NONE, NUMERICS, Told, draw_record, given_records, most_logprobs
from holdfast.worker.decoder.gpu.buffers import Buffers, Readback, Reading, Staging
from holdfast.worker.decoder.gpu.draw_launches import (
    ABSENT,
    EDIT_WORDS,
    EDITS,
    GIVEN,
    RECORD_WORDS,
    TOLD_WORDS,
    DrawLaunches,
    Edits,
    Rows,
    mask_words,
)
from holdfast.worker.decoder.gpu.drawn_tokens import DrawnTokens
from holdfast.worker.decoder.gpu.edit_table import EditTable
from holdfast.worker.decoder.gpu.graphs import Capture, DecodeGraphs, bucket_of
from holdfast.worker.decoder.gpu.launches import Launch, triton_launch
from holdfast.worker.plan.logits_settings import LogitsSettings
from holdfast.worker.plan.step_plan import DrawParams, PromptLogprobParams
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import Sampled
from holdfast.worker.sampling_params import MAX_LOGPROBS

_FEWEST_WORDS: Final = 4096


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws that the device has been given."""

    draws: Sequence[DrawParams]
    reading: Reading
    most: int
    """Best tokens that there is room for; `NONE` where nothing is told but tokens."""


class DeviceSampler:
    """A step sampler on the device of the logits. Used by one thread at a time."""

    numerics: Final = NUMERICS

    def __init__(
        self,
        device: torch.device,
        *,
        launch: Launch = triton_launch,
        capture: Capture | None = None,
        drawn: DrawnTokens | None = None,
    ) -> None:
        """`capture` makes a CUDA graph of work; without it kernels are launched one by one. What is drawn is written
        down in `drawn`.
        """
        self._buffers = Buffers(device)
        self._lists = Buffers(device)
        """What graphs do not read, so that it may grow."""
        self._launches = DrawLaunches(self._buffers, launch)
        self._graphs = DecodeGraphs(capture)
        self._readback = Readback(device)
        self._drawn_tokens = drawn or DrawnTokens(launch)
        self._staging = {name: Staging(_FEWEST_WORDS, device) for name in ("records", "masks", "edits", "edit tokens")}

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """As `StepSampler.sample`. Waits for the device once. The logits are edited on the way, and put back."""
        assert output.logits is not None, "a step that is drawn from asks for logits"
        return self.collect(self.launch(output.logits, draws, masks, prompts))

    def launch(
        self,
        logits: Tensor,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Drawing:
        """Starts the draws from rows [N, vocab] of logits, and waits for nothing."""
        table = EditTable(draws, masks, logits.shape[1])
        packed = [*map(draw_record, draws, table.numbers), *given_records(prompts)]
        asked = most_logprobs(draws, prompts)
        most = NONE if asked == NONE else max(asked, MAX_LOGPROBS)
        padded = (bucket_of(len(packed)) or len(packed)) if self._graphs.are_used else len(packed)
        rows = self._rows(logits, self._records(packed, padded), table)
        changes = self._edits(table, rows) if table.count else None
        if changes is not None:
            self._launches.edit(rows, changes)

        def work() -> None:
            drawn = self._launches.draw(rows)
            if most > NONE and changes is None:
                self._launches.tell(rows, drawn, most)

        told = NONE if changes is not None else most
        key = (padded, told, rows.masks is not None, logits.data_ptr(), *logits.stride(), logits.shape[1])
        self._graphs.run(key, self._buffers, work)
        if changes is not None:
            self._launches.restore(rows, changes)
            if most > NONE:
                self._launches.tell(rows, self._drawn(padded), most)
        self._drawn_tokens.last = self._drawn(padded)[: len(draws)]
        found = self._drawn(padded) if most == NONE else self._told(padded, most)
        return Drawing(draws, self._readback.start(found[: len(packed)]), most)

    def collect(self, drawing: Drawing) -> Sampled:
        """What was drawn. Waits for the device, and for no step that was launched later."""
        words, most = drawing.reading.wait(), drawing.most
        if most == NONE:
            nothing = np.empty((len(words), 0), np.int32)
            return Told(words[:, None], nothing, nothing.view(np.float32)).sampled(drawing.draws)
        head, ids, logprobs = np.split(words, [TOLD_WORDS, TOLD_WORDS + most], 1)
        return Told(head, ids, logprobs.view(np.float32)).sampled(drawing.draws)

    def warm_up(self, logits: Tensor) -> None:
        """Captures the graphs of draws from as many rows, of these logits, and makes room for their edits."""
        count = len(logits)
        edited = LogitsSettings(grammar="x", allowed_token_ids=array("q", [0]), repetition_penalty=2.0)
        plain = DrawParams(seed=0, first_output_index=0, temperature=1.0, top_k=0, top_p=1.0)
        telling = replace(plain, num_logprobs=0)
        masked = replace(plain, logits_settings=edited)
        for params in (masked, telling, plain):
            masks = dict.fromkeys(range(count), b"\x01") if params is masked else None
            self.collect(self.launch(logits, [params] * count, masks))

    def close(self) -> None:
        self._graphs.clear()

    def _drawn(self, num_rows: int) -> Tensor:
        return self._buffers.take("drawn", (num_rows,), torch.int32)

    def _told(self, num_rows: int, most: int) -> Tensor:
        return self._buffers.take("told", (num_rows, TOLD_WORDS + 2 * most), torch.int32)

    def _records(self, packed: list[bytes], padded: int) -> Tensor:
        """The records on the device, with those of rows that are none behind them."""
        table = np.zeros((padded, RECORD_WORDS), np.int32)
        table[: len(packed)] = np.frombuffer(b"".join(packed), np.int32).reshape(-1, RECORD_WORDS)
        table[len(packed) :, [GIVEN, EDITS]] = ABSENT, NONE
        return self._placed("records", table, self._buffers.take("records", table.shape, torch.int32))

    def _rows(self, logits: Tensor, records: Tensor, table: EditTable) -> Rows:
        """The rows, with the masks of those that have one: room for two of each row, so that graphs find them."""
        masks, vocab_size = table.masks, logits.shape[1]
        if not len(masks):
            return Rows(logits, vocab_size, records)
        room = self._buffers.take("masks", (2 * len(records), mask_words(vocab_size)), torch.int32)
        self._placed("masks", masks, room[: len(masks)])
        return Rows(logits, vocab_size, records, room, self._buffers.take("kept", (len(records),), torch.int32))

    def _edits(self, table: EditTable, rows: Rows) -> Edits:
        """The edits on the device."""
        take, tokens = self._lists.take, table.tokens
        room = 1 << len(tokens).bit_length()  # lists grow with every step, and their buffers are not to
        return Edits(
            table=self._placed("edits", table.table, take("edits", (len(rows.records), EDIT_WORDS), torch.int32)),
            tokens=self._placed("edit tokens", tokens, take("edit tokens", (room,), torch.int32)),
            saved=take("saved", (room,)),
            counts=self._lists.take_zeros("counts", (len(rows.records), rows.vocab_size), torch.int32),
        )

    def _placed(self, name: str, numbers: np.ndarray, target: Tensor) -> Tensor:
        """Copies an array to the device without a wait."""
        staging = self._staging[name]
        if numbers.size > staging.size:
            staging = self._staging[name] = Staging(2 * numbers.size, self._buffers.device)
        staging.free().numpy()[: numbers.size] = numbers.reshape(-1)
        staging.copy(target.view(-1)[: numbers.size])
        return target
