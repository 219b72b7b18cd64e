"""Step sampler: the interface to all results of a step's logits; draws as records of plain numbers, for samplers
outside Python; and log-probabilities of tokens that requests name.

The latter are taken from the logits as the model gave them, and do not affect a draw. The softmax is taken in float64
and rounded once, so a row does not depend on the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.draws import DRAW_PARAMETERS, DRAW_TYPES, DrawParams
from holdfast.worker.parameters import GREEDY_TEMPERATURE
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.step_plan import PromptLogprobParams


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Output of a model's head for the wanted rows of a step. One of the first two is there, or the last; on ranks that
    do not lead there may be none.
    """

    logits: Tensor | None
    """[rows wanted, vocab], float32. The next step may overwrite it."""
    best: list[int] | None
    """The argmax of each row, of equal logits the lowest token id; `NO_TOKEN` where not all of a row are finite."""
    block_best: Tensor | None = None
    """[rows wanted, ceil(vocab / 64)], float32: the largest of each 64 logits in turn, NaN where one is not finite.
    None where the head does not tell; it spares a sampler one reading of the logits."""
    block_mass: Tensor | None = None
    """Sum of exp(logit - the largest) over each 64 logits in turn, float32. Log-probabilities are computed from it and
    from `block_best`. None if no row asks for any."""
    steps: list[list[int]] | None = None
    """`best` of each step, where the batch was for several; all else is None then."""
    sampled: "Sampled | None" = None
    """Samples, if the device has drawn in the step itself."""
    pooled: "NDArray[np.float32] | None" = None
    """[rows that are pooled, hidden]: states behind the final norm, of the CPU executor; None: the batch has no
    grammar.
    """


class Sampled(NamedTuple):
    """Samples of one step."""

    token_ids: list[int]
    """One for each draw; `NO_TOKEN` where the row has a NaN, or its best logit is infinite."""
    logprobs: list[TokenLogprob | None]
    """One for each draw, None if not requested. Empty if no draw requests any."""
    prompt_logprobs: list[TokenLogprob]
    """One for each requested prompt token."""


class StepSampler(Protocol):
    """Draws tokens and reports log-probabilities."""

    @property
    def numerics(self) -> str:
        """Names the arithmetic: samplers of different numerics may draw different tokens from equal logits."""
        ...

    def sample(
        self,
        output: HeadOutput,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Sampled:
        """Reads the logits of `output`, which has some, and does not change them: a row for each draw, and after these
        one for each prompt token of `prompts`. `masks` are those of draws with a grammar, by row.
        """
        ...

    def close(self) -> None:
        """Frees threads and memory. Safe to call twice."""
        ...


@runtime_checkable
class OverlappingSampler(Protocol):
    """A step sampler of a device that runs by itself."""

    def launch(
        self,
        logits: Tensor,
        draws: Sequence[DrawParams],
        masks: Mapping[int, bytes] | None = None,
        prompts: Sequence[PromptLogprobParams] = (),
    ) -> Any:
        """Starts what `StepSampler.sample` does, and waits for nothing."""
        ...

    def collect(self, drawing: Any) -> Sampled:
        """Samples of the oldest draws that were launched and not collected. Waits for no step after them."""
        ...


RECORD: Final = Struct(f"@{''.join(DRAW_TYPES.values())}0q")
"""A draw, as `DRAW_TYPES` says; at its end padding to whole 64 bits."""

_parameters: Final = attrgetter(*DRAW_PARAMETERS)
_NEUTRAL: Final = tuple(PARAMETERS[name].default or 0 for name in DRAW_PARAMETERS)

NONE: Final = -1  # in a record: absent
NUMERICS: Final = "draws-3"
"""The arithmetic that a record is drawn by: the same tokens and log-probabilities from equal logits, to the bit."""


def draw_record(params: DrawParams, edits: int = NONE) -> bytes:
    """Record of one draw, as native code and Triton read it. `edits`: number of the row's edits."""
    sampling = params.sampling
    is_greedy = sampling.temperature < GREEDY_TEMPERATURE
    return RECORD.pack(
        *_parameters(sampling),
        *(0.0 if is_greedy else 1 / sampling.temperature, params.first_output_index, edits),
        *(NONE if sampling.logprobs is None else params.num_logprobs, NONE),
    )


def given_records(prompts: Sequence[PromptLogprobParams]) -> list[bytes]:
    """Records of rows that are not drawn from, but report the log-probability of a token."""
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
    """Output of a sampler for the rows of a step, with and without a draw."""

    def __init__(self, rows: NDArray[np.int32], top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> None:
        """`rows` [N, 4]: token, rank, log-probability as float32, and the number of valid ones among [N, most] best
        tokens.
        """
        self._rows = rows
        self._logprobs = rows.view(np.float32)
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def sampled(self, draws: Sequence[DrawParams]) -> Sampled:
        """Samples in the engine's form."""
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


_CHUNK_VALUES: Final = 2**22
"""Logits that are worked on at a time; each takes a few words of 64 bits."""


class ChosenLogprobs:
    """Log-probabilities of tokens that draws name, of all rows together: taken where the logits are, read later.

    They are PyTorch's on every device: a native sampler's own may differ in the last bit.
    """

    def __init__(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], values: Tensor) -> None:
        """`values`: those of all `token_ids` in turn, float32."""
        self._token_ids = dict(zip(rows, token_ids, strict=True))
        self._values = values

    @classmethod
    def of(cls, logits: Tensor, draws: Sequence[DrawParams]) -> "ChosenLogprobs | None":
        """Log-probabilities of named tokens in the rows of `logits` [N, vocab], float32, one for each draw; None if no
        draw names any.
        """
        rows = [row for row, params in enumerate(draws) if params.sampling.logprob_token_ids]
        if not rows:
            return None
        rows_at_once, values = max(1, _CHUNK_VALUES // logits.shape[1]), list[Tensor]()
        for start in range(0, len(rows), rows_at_once):
            chunk = rows[start : start + rows_at_once]
            ids = [draws[row].sampling.logprob_token_ids for row in chunk]
            places = [(at, token_id) for at, own in enumerate(ids) for token_id in own]
            at, columns = torch.tensor(places, device=logits.device).T
            values.append(log_softmax(logits[chunk])[at, columns])
        return cls(rows, [draws[row].sampling.logprob_token_ids for row in rows], torch.cat(values))

    def put_into(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """Log-probabilities of each row, with the named tokens in place of the best ones."""
        said, values = list(logprobs), iter(self._values.tolist())
        for row, token_ids in self._token_ids.items():
            top = tuple(zip(token_ids, values, strict=False))
            logprob = said[row]
            said[row] = None if logprob is None else replace(logprob, top=top)
        return said


def log_softmax(logits: Tensor) -> Tensor:
    """The log-softmax of each row, taken in float64; a row of odd length gets one more column, of no mass.

    Accelerators read float64 in aligned pairs, and may sum a row that begins within a pair in another order.
    """
    even = torch.nn.functional.pad(logits, (0, logits.shape[1] % 2), value=float("-inf"))
    return torch.log_softmax(even, -1, dtype=torch.float64).float()
