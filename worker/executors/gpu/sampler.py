"""Sampler of a device: a step's tokens drawn where its logits are, to the native sampler's bits, with one wait."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.draws import PENALTIES, DrawParams, LogitsSettings
from holdfast.worker.executors.gpu.draw_launches import (
    ABSENT,
    EDIT_WORDS,
    EDITS,
    GIVEN,
    RECORD_WORDS,
    REPORT_WORDS,
    DrawLaunches,
    DrawnTokens,
    Edits,
    EditTable,
    Int32Array,
    Rows,
)
from holdfast.worker.executors.gpu.graphs import (
    Buffers,
    Capture,
    DecodeGraphs,
    Readback,
    Reading,
    Staging,
    StepWait,
    bucket_of,
)
from holdfast.worker.executors.gpu.launches import Launch, triton_launch
from holdfast.worker.executors.step_sampler import (
    NONE,
    NUMERICS,
    HeadOutput,
    Sampled,
    SamplerOutput,
    draw_record,
    given_records,
    most_logprobs,
)
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_plan import PromptLogprobParams

USUAL_LOGPROBS: Final = 20
"""Room for the best tokens that a graph of the sampler has at least, so that most requests share one."""

_FEWEST_WORDS: Final = 4096


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """Requests for some rows' draws, placed where the kernels find them."""

    draws: Sequence[DrawParams]
    rows: Rows
    count: int
    """Rows that are no padding."""
    most: int
    """Same as in `Drawing`."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws that the device has been given."""

    draws: Sequence[DrawParams]
    reading: Reading
    most: int
    """Best tokens that there is room for; `NONE` where tokens alone are reported."""


def plain_draws(count: int) -> list[DrawParams]:
    """Draws of no meaning, to warm up with."""
    return [DrawParams(SamplingParams(seed=0), 0)] * count


class DeviceSampler:
    """A step sampler on the device of the logits. Used by one thread at a time."""

    numerics: Final = NUMERICS

    def __init__(
        self,
        buffers: Buffers,
        *,
        launch: Launch = triton_launch,
        capture: Capture | None = None,
        drawn: DrawnTokens | None = None,
        wait: StepWait | None = None,
    ) -> None:
        """`buffers` lie where the logits do. `capture` makes a CUDA graph of work; without it kernels are launched one
        by one. Sampled tokens are written to `drawn`. The host waits by `wait`.
        """
        self._wait = wait = wait or StepWait(math.inf)
        device = buffers.device
        self._buffers = buffers
        self._lists = Buffers(device)
        """Buffers that graphs do not read, so that they may grow."""
        self._launches = DrawLaunches(self._buffers, launch)
        self._graphs = DecodeGraphs(capture)
        self._readback = Readback(device, wait)
        self._drawn_tokens = drawn or DrawnTokens(launch)
        self._staging = {
            name: Staging(_FEWEST_WORDS, device, wait) for name in ("records", "masks", "edits", "edit tokens")
        }

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """Same as `StepSampler.sample`. Waits for the device once. The logits are edited on the way, and put back."""
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
        inputs = self._place(logits, draws, table, prompts)
        if not table.count:
            self._graphs.run(self.key_of(inputs), self._buffers, lambda: self.draw(inputs))
            return self.send(inputs)
        changes = self._edits(table, inputs.rows)
        self._launches.edit(inputs.rows, changes)
        silent = replace(inputs, most=NONE)  # log-probabilities are raw
        self._graphs.run(self.key_of(silent), self._buffers, lambda: self.draw(silent))
        self._launches.restore(inputs.rows, changes)
        if inputs.most > NONE:
            self._launches.tell(inputs.rows, self._drawn(len(inputs.rows.records)), inputs.most)
        return self.send(inputs)

    def place(self, logits: Tensor, draws: Sequence[DrawParams]) -> SamplerInput:
        """Declares the draws of logits that will exist later, without logits processors; for `draw` and `send`."""
        return self._place(logits, draws, None, ())

    def key_of(self, inputs: SamplerInput) -> tuple[object, ...]:
        """Properties of some draws that are fixed in a graph."""
        logits = inputs.rows.logits
        sizes = (len(inputs.rows.records), inputs.most, *logits.shape[1:], *logits.stride())
        return ("draws", *sizes, inputs.rows.masks is not None, logits.data_ptr())

    def draw(self, inputs: SamplerInput) -> None:
        """Launches the draws, of edited rows if there are edits, and the reports of them."""
        drawn = self._launches.draw(inputs.rows)
        if inputs.most > NONE:
            self._launches.tell(inputs.rows, drawn, inputs.most)

    def send(self, inputs: SamplerInput) -> Drawing:
        """Starts the copy of sampled tokens to the host."""
        padded = len(inputs.rows.records)
        self._drawn_tokens.last = self._drawn(padded)[: len(inputs.draws)]
        found = self._drawn(padded) if inputs.most == NONE else self._told(padded, inputs.most)
        return Drawing(inputs.draws, self._readback.start(found[: inputs.count]), inputs.most)

    def collect(self, drawing: Drawing) -> Sampled:
        """Samples of a drawing. Waits for the device, and for no step that was launched later."""
        words, most = drawing.reading.wait(), drawing.most
        if most == NONE:
            nothing = np.empty((len(words), 0), np.int32)
            return SamplerOutput(words[:, None], nothing, nothing.view(np.float32)).sampled(drawing.draws)
        head, ids, logprobs = np.split(words, [REPORT_WORDS, REPORT_WORDS + most], 1)
        return SamplerOutput(head, ids, logprobs.view(np.float32)).sampled(drawing.draws)

    def warm_up(self, logits: Tensor) -> None:
        """Captures the graphs of draws from this many rows of these logits, and allocates memory for their edits."""
        count = len(logits)
        penalized: dict[str, Any] = {PENALTIES[0]: 2.0}
        edited = LogitsSettings(grammar="x", allowed_token_ids=array("q", [0]), **penalized)
        (plain,) = plain_draws(1)
        telling = replace(plain, sampling=plain.sampling.with_changes(logprobs=0))
        masked = replace(plain, logits_settings=edited)
        for params in (masked, telling, plain):
            masks = dict.fromkeys(range(count), b"\x01") if params is masked else None
            self.launch(logits, [params] * count, masks)

    def close(self) -> None:
        self._graphs.clear()

    def _place(
        self,
        logits: Tensor,
        draws: Sequence[DrawParams],
        table: EditTable | None,
        prompts: Sequence[PromptLogprobParams],
    ) -> SamplerInput:
        """Copies records and masks to the device. Rows are padded to those of a graph."""
        numbers = [NONE] * len(draws) if table is None else table.numbers
        packed = [*map(draw_record, draws, numbers), *given_records(prompts)]
        most_wanted = most_logprobs(draws, prompts)
        most = NONE if most_wanted == NONE else max(most_wanted, USUAL_LOGPROBS)
        padded = (bucket_of(len(packed)) or len(packed)) if self._graphs.are_used else len(packed)
        rows = Rows(logits, logits.shape[1], self._records(packed, padded))
        if table is not None and len(table.masks):
            rows = self._masked(rows, table.masks)
        return SamplerInput(draws, rows, len(packed), most)

    def _drawn(self, num_rows: int) -> Tensor:
        return self._buffers.take("drawn", (num_rows,), torch.int32)

    def _told(self, num_rows: int, most: int) -> Tensor:
        return self._buffers.take("report", (num_rows, REPORT_WORDS + 2 * most), torch.int32)

    def _records(self, packed: list[bytes], padded: int) -> Tensor:
        """The records on the device, with those of rows that are none behind them."""
        table = np.zeros((padded, RECORD_WORDS), np.int32)
        table[: len(packed)] = np.frombuffer(b"".join(packed), np.int32).reshape(-1, RECORD_WORDS)
        table[len(packed) :, [GIVEN, EDITS]] = ABSENT, NONE
        return self._placed("records", table, self._buffers.take("records", table.shape, torch.int32))

    def _masked(self, rows: Rows, masks: Int32Array) -> Rows:
        """The rows with these masks: there is room for two of each row, so that graphs find them."""
        count = len(rows.records)
        room = self._buffers.take("masks", (2 * count, masks.shape[1]), torch.int32)
        self._placed("masks", masks, room[: len(masks)])
        return replace(rows, masks=room, kept=self._buffers.take("kept", (count,), torch.int32))

    def _edits(self, table: EditTable, rows: Rows) -> Edits:
        """The edits on the device."""
        take, tokens = self._lists.take, table.tokens
        room = max(
            _FEWEST_WORDS, 1 << len(tokens).bit_length()
        )  # lists grow with every step, and their buffers are not to
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
            staging = self._staging[name] = Staging(2 * numbers.size, self._buffers.device, self._wait)
        staging.free().numpy()[: numbers.size] = numbers.reshape(-1)
        staging.copy(target.view(-1)[: numbers.size])
        return target
