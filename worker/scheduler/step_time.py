"""Step-time model: a linear model of four coefficients, fitted while steps are measured.

step_s = base + per_decode * decodes + per_token * tokens + per_context_token * context tokens
"""

import math
from dataclasses import asdict, dataclass
from typing import Final

from holdfast.worker.step_plan import StepPlan

_UNITS: Final = (1.0, 16.0, 64.0, 65536.0)
"""One of each feature is about as much work as one of another: keeps the equations well conditioned."""
_FORGETTING: Final = 0.998
"""Weight of a sample against the one after it: the last 500 count."""
_ANCHOR: Final = 0.1
"""Share of all samples' weight that holds a coefficient where it was, at every fit."""
_NUM_FIRST_SAMPLES: Final = 16
"""First samples that are taken unchecked: only then is there a scale by which to call one an outlier."""
_FIT_EVERY: Final = 8  # steps
_MAX_DEVIATIONS: Final = 3.0  # relative errors; a slower step is an outlier
_MIN_ERROR: Final = 0.02  # relative
_SPEED_CHANGE: Final = 0.12
"""Samples that differ by this share on average are of a machine that has changed its speed."""


@dataclass(slots=True, kw_only=True)
class StepShape:
    """Shape of a step that its time depends on. Made at every step, so no frozen class, which takes longer to make."""

    num_decodes: int
    """Rows of sequences that had all but their newest token computed."""
    num_tokens: int
    """Tokens of decodes and of prompt chunks together."""
    num_context_tokens: int
    """Tokens attended to, summed over all tokens of the step: each attends to its position + 1."""


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a step without drafts of a draft model: see `StepPlan.with_drafts`."""
    num_decodes = num_tokens = len(plan.decodes)
    num_context_tokens = plan.decodes.num_context_tokens
    for item in plan.others:
        count = len(item.token_ids)
        num_decodes += item.num_draws == count
        num_tokens += count
        num_context_tokens += count * item.first_position + count * (count + 1) // 2
    return StepShape(num_decodes=num_decodes, num_tokens=num_tokens, num_context_tokens=num_context_tokens)


@dataclass(slots=True, kw_only=True)
class StepSample(StepShape):
    """A step that was measured."""

    num_seqs: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The coefficients, in seconds; none is negative. The defaults are a small model on a slow CPU."""

    base_s: float = 2e-3
    decode_s: float = 1e-4
    token_s: float = 1e-4
    context_token_s: float = 1e-8

    def predict(self, shape: StepShape) -> float:
        """Seconds that such a step takes."""
        rows = self.base_s + self.decode_s * shape.num_decodes + self.token_s * shape.num_tokens
        return rows + self.context_token_s * shape.num_context_tokens

    def prefill_tokens_within(self, limit_s: float, decodes: StepShape, *, first_position: int = 0, most: int) -> int:
        """Tokens of a prompt, from `first_position` on, that a step with these decodes can take in `limit_s`.

        From 0 to `most`. A chunk of n tokens attends to n * first_position + n * (n + 1) / 2, so this is the positive
        root of a quadratic equation.
        """
        room_s = limit_s - self.predict(decodes)
        if room_s <= 0:
            return 0
        square = self.context_token_s / 2
        linear = self.token_s + self.context_token_s * (first_position + 0.5)
        divisor = linear + math.sqrt(linear * linear + 4 * square * room_s)
        if 2 * room_s >= most * divisor:
            return most
        return int(2 * room_s / divisor)

    def decodes_within(self, limit_s: float, *, context_tokens: float, tokens_each: float = 1, most: int) -> int:
        """Sequences that can decode together in `limit_s`, from 0 to `most`.

        Each attends to `context_tokens`, and takes part with `tokens_each`: more than one where tokens are drafted.
        """
        room_s = limit_s - self.base_s
        if room_s <= 0:
            return 0
        each_s = self.decode_s + tokens_each * (self.token_s + self.context_token_s * context_tokens)
        return most if room_s >= most * each_s else int(room_s / each_s)


class StepTimeModel:
    """Fits `StepCosts` to the steps of one engine, by recursive least squares with exponential forgetting.

    The relative error is minimized, so that a short decode counts as much as a long prefill. A sample that is far out
    is pulled in to three typical errors (Huber's rule): a pause of the machine is no news of the model. Errors that
    keep to one sign are: the machine is then taken to be slower, or faster, in everything. And every fit is anchored at
    the previous one: a coefficient that the load determines well is learned within a few fits, one that it hardly
    determines is learned slowly instead of being guessed from noise, and one that it does not determine is kept.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.costs = costs or StepCosts()
        """The best knowledge so far; without samples, the start that was given."""
        self.num_samples = 0
        self.relative_error = _MIN_ERROR
        """A typical share by which prediction and measurement differ."""
        self._drift = 0.0  # mean of the last errors, with their signs
        self._products = [[0.0] * 4 for _ in range(4)]  # weighted sums of feature i * feature j, where j >= i
        self._targets = [0.0] * 4  # weighted sums of feature * seconds

    def observe(self, sample: StepSample) -> None:
        """Take in a step. A few microseconds, and some tens every eighth time."""
        if sample.step_s <= 0:
            return  # a clock too coarse to tell anything
        self.num_samples += 1
        expected_s = self.costs.predict(sample)
        is_first = self.num_samples <= _NUM_FIRST_SAMPLES
        self._accumulate(sample, sample.step_s if is_first or expected_s <= 0 else expected_s)
        if is_first or self.num_samples % _FIT_EVERY == 0:
            if abs(self._drift) > _SPEED_CHANGE:
                self._rescale(1 + self._drift)
            self._fit()

    def predict(self, shape: StepShape) -> float:
        """Seconds that such a step takes."""
        return self.costs.predict(shape)

    def prefill_s(self, first_position: int, num_tokens: int) -> float:
        """Seconds of a step that computes this number of prompt tokens only; infinite before anything was measured."""
        if not self.num_samples:
            return math.inf
        context = num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
        return self.costs.predict(StepShape(num_decodes=0, num_tokens=num_tokens, num_context_tokens=context))

    def _accumulate(self, sample: StepSample, scale_s: float) -> None:
        """Add a sample in units of `scale_s`, which makes its error relative."""
        decodes_unit, tokens_unit, context_unit = _UNITS[1:]
        one = 1 / scale_s
        features = [
            one,
            sample.num_decodes / decodes_unit * one,
            sample.num_tokens / tokens_unit * one,
            sample.num_context_tokens / context_unit * one,
        ]
        ratio = sample.step_s / scale_s
        if self.num_samples > _NUM_FIRST_SAMPLES:
            ratio = self._pulled_in(ratio)
        for i, feature in enumerate(features):
            products = self._products[i]
            for j in range(i, 4):
                products[j] = _FORGETTING * products[j] + feature * features[j]
            self._targets[i] = _FORGETTING * self._targets[i] + feature * ratio

    def _pulled_in(self, ratio: float) -> float:
        """The measured over the expected time, clipped to a believable range; learns the typical value."""
        far = _MAX_DEVIATIONS * self.relative_error
        error = ratio - 1
        self.relative_error += 0.02 * (min(abs(error), 2 * far) - self.relative_error)
        self.relative_error = max(_MIN_ERROR, self.relative_error)
        self._drift += (max(-1.0, min(1.0, error)) - self._drift) / 32
        return 1 + min(far, max(-far, error))

    def _rescale(self, factor: float) -> None:
        """Treat all earlier measurements as from a machine that is slower by `factor`."""
        self._drift = 0.0
        self._targets = [factor * target for target in self._targets]
        self.costs = StepCosts(**{name: factor * cost for name, cost in asdict(self.costs).items()})

    def _fit(self) -> None:
        """Least squares without negative coefficients, near the last ones where the samples say nothing."""
        costs = self.costs
        old = [costs.base_s, costs.decode_s * _UNITS[1], costs.token_s * _UNITS[2], costs.context_token_s * _UNITS[3]]
        anchor = _ANCHOR * self._products[0][0]
        rows = []
        for i in range(4):
            row = [0.0] * 5
            for j in range(4):
                row[j] = self._products[min(i, j)][max(i, j)]
            row[i] += anchor
            row[4] = self._targets[i] + anchor * old[i]
            rows.append(row)
        new = _non_negative_solution(rows)
        self.costs = StepCosts(
            base_s=new[0],
            decode_s=new[1] / _UNITS[1],
            token_s=new[2] / _UNITS[2],
            context_token_s=new[3] / _UNITS[3],
        )


def _non_negative_solution(equations: list[list[float]]) -> list[float]:
    """Solves the normal equations over those unknowns that come out positive; the others are 0. Each equation ends in
    its right-hand side.

    The most negative one is given up first, and the rest is solved again: at most four times.
    """
    solution = [0.0] * len(equations)
    kept = list(range(len(equations)))
    while kept:
        rows = []
        for i in kept:
            row = []
            for j in kept:
                row.append(equations[i][j])
            rows.append([*row, equations[i][-1]])
        values = _solve(rows)
        least = min(values)
        if least >= 0:
            for i, value in zip(kept, values, strict=True):
                solution[i] = value
            break
        del kept[values.index(least)]
    return solution


def _solve(rows: list[list[float]]) -> list[float]:
    """Gauss elimination of a positive definite system, each row ending in its right-hand side."""
    size = len(rows)
    for pivot, row in enumerate(rows):
        for below in rows[pivot + 1 :]:
            factor = below[pivot] / row[pivot]
            for column in range(pivot, size + 1):
                below[column] -= factor * row[column]
    values = [0.0] * size
    for pivot in reversed(range(size)):
        row = rows[pivot]
        known = 0.0
        for column in range(pivot + 1, size):
            known += row[column] * values[column]
        values[pivot] = (row[size] - known) / row[pivot]
    return values
