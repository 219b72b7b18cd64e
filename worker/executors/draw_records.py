"""Draws as records of plain numbers, in which samplers that are no Python take them."""

from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.draws import DRAW_PARAMETERS, DRAW_TYPES, DrawParams
from holdfast.worker.executors.step_sampler import Sampled
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import GREEDY_TEMPERATURE, PARAMETERS
from holdfast.worker.step_plan import PromptLogprobParams

RECORD: Final = Struct(f"@{''.join(DRAW_TYPES.values())}0q")
"""A draw, as `DRAW_TYPES` says; at its end padding to whole 64 bits."""

_parameters: Final = attrgetter(*DRAW_PARAMETERS)
_NEUTRAL: Final = tuple(PARAMETERS[name].default or 0 for name in DRAW_PARAMETERS)

NONE: Final = -1
NUMERICS: Final = "draws-3"
"""The arithmetic that a record is drawn by: the same tokens and log-probabilities from equal logits, to the bit."""


def draw_record(params: DrawParams, edits: int = NONE) -> bytes:
    sampling = params.sampling
    is_greedy = sampling.temperature < GREEDY_TEMPERATURE
    return RECORD.pack(
        *_parameters(sampling),
        *(0.0 if is_greedy else 1 / sampling.temperature, params.first_output_index, edits),
        *(NONE if sampling.logprobs is None else params.num_logprobs, NONE),
    )


def given_records(prompts: Sequence[PromptLogprobParams]) -> list[bytes]:
    """Of rows that are not drawn from, but tell the log-probability of a token."""
    return [
        RECORD.pack(*_NEUTRAL, 0.0, 0, NONE, wanted.num_logprobs, token)
        for wanted in prompts
        for token in wanted.token_ids
    ]


def most_logprobs(draws: Sequence[DrawParams], prompts: Sequence[PromptLogprobParams]) -> int:
    """The largest number of best tokens that any row tells; `NONE` where no row tells anything."""
    asked = [params.num_logprobs or 0 for params in draws if params.sampling.logprobs is not None]
    return max([*asked, *(wanted.num_logprobs for wanted in prompts)], default=NONE)


class SamplerOutput:
    """What a sampler has said of the rows of a step, with and without a draw."""

    def __init__(self, rows: NDArray[np.int32], top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> None:
        """`rows` [N, 4]: token, rank, log-probability as float32, and how many of [N, most] best tokens count."""
        self._rows = rows
        self._logprobs = rows.view(np.float32)
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def sampled(self, draws: Sequence[DrawParams]) -> Sampled:
        """As the engine takes it."""
        token_ids: list[int] = self._rows[:, 0].tolist()
        num_draws = len(draws)
        logprobs: list[TokenLogprob | None] = []
        if any(params.sampling.logprobs is not None for params in draws):
            logprobs = [
                self._logprob(row) if params.sampling.logprobs is not None else None for row, params in enumerate(draws)
            ]
        return Sampled(
            token_ids[:num_draws], logprobs, [self._logprob(row) for row in range(num_draws, len(token_ids))]
        )

    def _logprob(self, row: int) -> TokenLogprob:
        token_id, rank, _, num_top = self._rows[row].tolist()
        top = zip(self._top_ids[row, :num_top].tolist(), self._top_logprobs[row, :num_top].tolist(), strict=True)
        return TokenLogprob(token_id=token_id, logprob=float(self._logprobs[row, 2]), rank=rank, top=tuple(top))
