"""Native sampler: a step sampler whose arithmetic is compiled, on threads of a pool, with the same bits on any x86-64.

What may live here: one step's draws as the library takes them, and what comes back. What may not: arithmetic
(`native/sampler.cpp`, `native/edits.h`), and what the parameters mean (`worker/sampling/`, the reference in PyTorch).
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import CDLL, POINTER, c_char_p, c_void_p, cast
from struct import Struct
from typing import Final

import numpy as np

from holdfast.worker.decoder.cpu.library import load_library
from holdfast.worker.decoder.cpu.structures import HfDraw, HfDrawn, HfEdits
from holdfast.worker.errors import ReplicaError
from holdfast.worker.plan.draws import banned_token_ids
from holdfast.worker.plan.logits_settings import LogitsSettings
from holdfast.worker.plan.step_plan import DrawParams, PromptLogprobParams
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling.head_output import HeadOutput
from holdfast.worker.sampling.step_sampler import Sampled
from holdfast.worker.sampling_params import GREEDY_TEMPERATURE

_DRAW: Final = Struct("@qddfiiiii")
_NONE: Final = -1
_NO_EDITS: Final = (HfEdits * 0)()


class NativeSampler:
    """Draws on the threads of a pool, a row on one thread. Used by one thread at a time."""

    numerics: Final = "draws-3"

    def __init__(self, library: CDLL, pool: int) -> None:
        """`pool` outlives this."""
        assert _DRAW.size == ctypes.sizeof(HfDraw), "a draw is packed as the library reads it"
        self._library = library
        self._own_pool: int | None = None
        self._sampler = library.hf_sampler_create(pool)
        if not self._sampler:
            raise ReplicaError("there is no memory for a sampler")

    @classmethod
    def with_threads(cls, num_threads: int, instruction_class: str | None = None) -> "NativeSampler":
        """A sampler with a pool of its own. Raises `Unavailable` where this machine cannot run it."""
        library = load_library(instruction_class)
        pool = library.hf_pool_create(num_threads, -1, None)
        if not pool:
            raise ReplicaError(f"{num_threads} threads could not be started")
        sampler = cls(library, pool)
        sampler._own_pool = pool
        return sampler

    def close(self) -> None:
        self._library.hf_sampler_destroy(self._sampler)
        self._sampler = None
        if self._own_pool is not None:
            self._library.hf_pool_destroy(self._own_pool)
            self._own_pool = None

    def __del__(self) -> None:
        if getattr(self, "_own_pool", None) is not None:
            self.close()

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """As `StepSampler.sample`. Raises `ReplicaError` in a child of the process that made the pool."""
        logits, best, mass = output.logits, output.block_best, output.block_mass
        assert logits is not None, "a step that is drawn from asks for logits"
        logits = logits.contiguous()  # those of a split vocabulary may be cut out of a padded one
        rows = _Rows(draws, masks or {}, prompts)
        told = _Told(rows.count, rows.most_logprobs)
        outcome = self._library.hf_sample(
            *(self._sampler, logits.data_ptr(), logits.shape[1]),
            *(None if known is None else known.data_ptr() for known in (best, mass)),
            *(rows.packed, rows.count, rows.edits, told.drawn),
            *(told.top_ids.ctypes.data, told.top_logprobs.ctypes.data, rows.most_logprobs),
        )
        if outcome:
            raise ReplicaError(f"the sampler's threads did not run a step ({outcome})")
        return told.sampled(draws)


class _Rows:
    """The rows of a step as the library takes them. What they point to lives as long as this."""

    def __init__(
        self, draws: Sequence[DrawParams], masks: Mapping[int, bytes], prompts: Sequence[PromptLogprobParams]
    ) -> None:
        self._kept: list[object] = []
        self.most_logprobs = 0
        edits: list[HfEdits] = []
        parts: list[bytes] = []
        for row, params in enumerate(draws):
            number = _NONE
            if params.logits_settings is not None:
                number = len(edits)
                edits.append(self._edits(params, params.logits_settings, masks.get(row)))
            parts.append(self._draw(params, number))
        for wanted in prompts:
            self.most_logprobs = max(self.most_logprobs, wanted.num_logprobs)
            parts += [
                _DRAW.pack(0, 0.0, 1.0, 0.0, 0, 0, _NONE, wanted.num_logprobs, token) for token in wanted.token_ids
            ]
        self.count = len(parts)
        self.packed = b"".join(parts)
        self.edits = (HfEdits * len(edits))(*edits) if edits else _NO_EDITS

    def _draw(self, params: DrawParams, edits: int) -> bytes:
        is_greedy = params.temperature < GREEDY_TEMPERATURE
        num_logprobs = _NONE
        if params.num_logprobs is not None:
            num_logprobs = params.num_logprobs
            self.most_logprobs = max(self.most_logprobs, num_logprobs)
        return _DRAW.pack(
            *(params.seed, params.min_p, params.top_p, 0.0 if is_greedy else 1 / params.temperature),
            *(params.first_output_index, params.top_k, edits, num_logprobs, _NONE),
        )

    def _edits(self, params: DrawParams, settings: LogitsSettings, mask: bytes | None) -> HfEdits:
        banned = banned_token_ids(params)
        edits = HfEdits(
            repetition=settings.repetition_penalty,
            frequency=settings.frequency_penalty,
            presence=settings.presence_penalty,
            penalize=settings.penalize,
        )
        if mask is not None:
            self._kept.append(mask)
            edits.mask, edits.mask_bits = cast(c_char_p(mask), c_void_p).value, 8 * len(mask)
        if settings.allowed_token_ids is not None:
            edits.allowed, edits.num_allowed = self._place(settings.allowed_token_ids)
        if banned:
            edits.banned, edits.num_banned = self._place(array("q", banned))
        if settings.logit_bias:
            token_ids, biases = zip(*settings.logit_bias, strict=True)
            edits.biased, edits.num_biased = self._place(array("q", token_ids))
            edits.biases, _ = self._place(array("f", biases))
        if settings.penalize:
            edits.outputs, edits.num_outputs = self._place(array("q", params.output_token_ids))
            edits.prompt, edits.num_prompt = self._place(settings.prompt_token_ids)
        return edits

    def _place(self, items: "array[int] | array[float]") -> tuple[int, int]:
        self._kept.append(items)
        return items.buffer_info()


class _Told:
    """What the library says of the rows of a step."""

    def __init__(self, count: int, most_logprobs: int) -> None:
        self._rows = np.empty((count, ctypes.sizeof(HfDrawn) // 4), dtype=np.int32)
        self.drawn = self._rows.ctypes.data_as(POINTER(HfDrawn))
        self.top_ids = np.empty((count, most_logprobs), dtype=np.int32)
        self.top_logprobs = np.empty((count, most_logprobs), dtype=np.float32)

    def sampled(self, draws: Sequence[DrawParams]) -> Sampled:
        """As the engine takes it."""
        token_ids: list[int] = self._rows[:, 0].tolist()
        num_draws = len(draws)
        logprobs: list[TokenLogprob | None] = []
        if any(params.num_logprobs is not None for params in draws):
            logprobs = [
                self._logprob(row, token_ids[row]) if params.num_logprobs is not None else None
                for row, params in enumerate(draws)
            ]
        prompt_logprobs = [self._logprob(row, token_ids[row]) for row in range(num_draws, len(token_ids))]
        return Sampled(token_ids[:num_draws], logprobs, prompt_logprobs)

    def _logprob(self, row: int, token_id: int) -> TokenLogprob:
        _, rank, _, num_top = self._rows[row].tolist()
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        logprob = float(self._rows[row : row + 1].view(np.float32)[0, 2])
        return TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
