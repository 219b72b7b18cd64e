"""Native sampler: a step sampler whose arithmetic is compiled, on threads of a pool,
with the same bits on any x86-64.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import CDLL, POINTER, c_char_p, c_void_p, cast
from typing import Final

import numpy as np

from holdfast.worker.draws import DrawParams, LogitsSettings, banned_token_ids
from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.cpu.step_structures import NativeDraw, NativeDrawn, NativeEdits
from holdfast.worker.executors.step_sampler import (
    NONE,
    NUMERICS,
    RECORD,
    HeadOutput,
    Sampled,
    SamplerOutput,
    draw_record,
    given_records,
    most_logprobs,
)
from holdfast.worker.step_plan import PromptLogprobParams

_NO_EDITS: Final = (NativeEdits * 0)()


class NativeSampler:
    """Draws on the threads of a pool, a row on one thread. Used by one thread at a time."""

    numerics: Final = NUMERICS

    def __init__(self, library: CDLL, pool: int) -> None:
        """`pool` outlives this."""
        assert RECORD.size == ctypes.sizeof(NativeDraw), "a draw is packed as the library reads it"
        self._library = library
        self._sampler = library.native_sampler_create(pool)
        if not self._sampler:
            raise ReplicaError("there is no memory for a sampler")

    def close(self) -> None:
        """Raises `ReplicaError` while it draws, on another thread: what that uses stays as it is."""
        if self._library.native_sampler_destroy(self._sampler):
            raise ReplicaError("a draw is under way: its memory cannot be freed")
        self._sampler = None

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """Same as `StepSampler.sample`. Raises `ReplicaError` in a child of the process that made the pool."""
        logits, best, mass = output.logits, output.block_best, output.block_mass
        assert logits is not None, "a step that is drawn from asks for logits"
        # A GPU without Triton draws here too, and the logits of a split vocabulary are cut out of padded ones.
        logits = logits.cpu().contiguous()
        rows = _Rows(draws, masks or {}, prompts)
        most = max(0, most_logprobs(draws, prompts))
        drawn = np.empty((rows.count, ctypes.sizeof(NativeDrawn) // 4), dtype=np.int32)
        top_ids = np.empty((rows.count, most), dtype=np.int32)
        top_logprobs = np.empty((rows.count, most), dtype=np.float32)
        outcome = self._library.native_sample(
            *(self._sampler, logits.data_ptr(), logits.shape[1]),
            *(None if known is None else known.data_ptr() for known in (best, mass)),
            *(rows.packed, rows.count, rows.edits, drawn.ctypes.data_as(POINTER(NativeDrawn))),
            *(top_ids.ctypes.data, top_logprobs.ctypes.data, most),
        )
        check_outcome(outcome, "the draws of a step")
        return SamplerOutput(drawn, top_ids, top_logprobs).sampled(draws)


class _Rows:
    """The rows of a step as the library takes them. Their arrays live as long as this."""

    def __init__(
        self, draws: Sequence[DrawParams], masks: Mapping[int, bytes], prompts: Sequence[PromptLogprobParams]
    ) -> None:
        self._kept: list[object] = []
        edits: list[NativeEdits] = []
        parts: list[bytes] = []
        for row, params in enumerate(draws):
            number = NONE
            if params.logits_settings is not None:
                number = len(edits)
                edits.append(self._edits(params, params.logits_settings, masks.get(row)))
            parts.append(draw_record(params, number))
        parts += given_records(prompts)
        self.count = len(parts)
        self.packed = b"".join(parts)
        self.edits = (NativeEdits * len(edits))(*edits) if edits else _NO_EDITS

    def _edits(self, params: DrawParams, settings: LogitsSettings, mask: bytes | None) -> NativeEdits:
        banned = banned_token_ids(params)
        edits = NativeEdits(penalize=settings.penalize)
        edits.penalties[:] = settings.penalties
        if mask is not None:
            self._kept.append(mask)
            edits.mask, edits.mask_bits = cast(c_char_p(mask), c_void_p).value, 8 * len(mask)
        if settings.allowed_token_ids is not None:
            edits.allowed, edits.num_allowed = self._place(settings.allowed_token_ids)
        if banned:
            edits.banned, edits.num_banned = self._place(array("q", banned))
        if settings.logit_bias:
            edits.biased, edits.num_biased = self._place(settings.biased_token_ids)
            edits.biases, _ = self._place(settings.biases)
        if settings.penalize:
            outputs = params.output_token_ids
            as_array = outputs if isinstance(outputs, array) else array("q", outputs)
            edits.outputs, edits.num_outputs = self._place(as_array)
            edits.prompt, edits.num_prompt = self._place(settings.prompt_token_ids)
        return edits

    def _place(self, items: "array[int] | array[float]") -> tuple[int, int]:
        self._kept.append(items)
        return items.buffer_info()
