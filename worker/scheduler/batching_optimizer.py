"""Batching optimizer: which step limits would meet a target time per output token, and why."""

from dataclasses import dataclass, replace
from typing import Final

from holdfast.worker.scheduler.batching import StepLimits
from holdfast.worker.scheduler.step_time import StepSample, StepShape, StepTimeModel

DEAD_BAND: Final = 1.25
"""A proposal within this factor of the value changes nothing: measurements differ by less than this on a steady load.
To undo the last change takes the square of it, since one excess may be noise."""
NUM_IN_A_ROW: Final = 3
"""Proposals in a row that must point the same way: a burst is no change of load."""
COOL_DOWN: Final = 4
"""Proposals after a change that are ignored: they are still about the time before it, or about going over to it."""


class Hysteresis:
    """An integer between bounds. It goes where the proposals point, in one change, and no further than the most modest.

    It converges, because a proposal is the target value, not a difference, and must not depend on the current value.
    After a change the proposals of a steady load lie in the dead band around the value, and nothing changes until the
    load does.
    """

    def __init__(self, value: int, *, low: int, high: int) -> None:
        assert low <= value <= high, f"{value} is not between {low} and {high}"
        self.value = value
        self._low, self._high = low, high
        self.reason = ""
        """Reason of the proposal that it was last set to."""
        self._proposals: list[tuple[int, str]] = []
        self._last_was_up: bool | None = None
        self._num_ignored = 0

    def propose(self, value: int, reason: str = "") -> bool:
        """Takes in the target value. Returns whether it was changed."""
        if self._num_ignored:
            self._num_ignored -= 1
            return False
        value = min(self._high, max(self._low, value))
        is_up = value > self.value
        goes_back = self._last_was_up is not None and is_up != self._last_was_up
        band = DEAD_BAND * DEAD_BAND if goes_back else DEAD_BAND
        if self.value / band <= value <= self.value * band:
            self._proposals.clear()
            return False
        if self._proposals and (self._proposals[-1][0] > self.value) != is_up:
            self._proposals.clear()
        self._proposals.append((value, reason))
        if len(self._proposals) < NUM_IN_A_ROW:
            return False
        self.value, self.reason = min(self._proposals, key=lambda proposal: abs(proposal[0] - self.value))
        self._last_was_up = is_up
        self._proposals.clear()
        self._num_ignored = COOL_DOWN
        return True


WINDOW: Final = 64
"""Steps with decodes that are judged together."""
_ADVICE_FACTOR: Final = 4
"""Advice may reach this multiple of the configured value."""
_MIN_BATCHED_TOKENS: Final = 64
"""Fewer tokens in a step cost more in steps than they save in time."""
_DECODE_SHARE: Final = 0.8
"""Share of the target for decodes: the rest is for the prompts of others."""
_SLACK: Final = 0.8
"""Full steps that take less than this share of the target leave room for more."""
_MIN_FULL_STEPS: Final = 4
_WORTHWHILE: Final = 1.05
"""Drafts of another length must promise this much more speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended value of a setting, and the reason. `current` is the configured value."""

    setting: str
    current: int
    recommended: int
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.current} -> {self.recommended}, because {self.reason}"


@dataclass(slots=True, kw_only=True)
class StepReport:
    """A measured step, with what only the plan and the queues know of it."""

    sample: StepSample
    num_decode_tokens: int
    """Tokens of its decodes: one each, and their drafts."""
    num_decode_context_tokens: int
    """Tokens among `num_context_tokens` that the decodes attended to."""
    num_accepted_drafts: int
    num_waiting: int
    """Requests that had no place when the step ended."""


@dataclass(slots=True)
class _Window:
    """Sums over steps with decodes; over nothing, all are 0."""

    num_steps: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_decode_context_tokens: int = 0
    num_accepted: int = 0
    num_crowded: int = 0
    """Steps after which requests waited although all places were taken."""
    num_full: int = 0
    """Steps in which prompts got all tokens that there were."""
    num_prefill_tokens: int = 0
    num_prefill_context_tokens: int = 0

    def add(self, report: StepReport, limits: StepLimits) -> None:
        sample = report.sample
        num_prefill_tokens = sample.num_tokens - report.num_decode_tokens
        self.num_steps += 1
        self.num_decodes += sample.num_decodes
        self.num_decode_tokens += report.num_decode_tokens
        self.num_decode_context_tokens += report.num_decode_context_tokens
        self.num_accepted += report.num_accepted_drafts
        self.num_crowded += report.num_waiting > 0 and sample.num_seqs >= limits.max_num_seqs
        self.num_prefill_tokens += num_prefill_tokens
        self.num_prefill_context_tokens += sample.num_context_tokens - report.num_decode_context_tokens
        if num_prefill_tokens and sample.num_tokens >= limits.max_num_batched_tokens:
            self.num_full += 1

    @property
    def mean_decodes(self) -> float:
        return self.num_decodes / self.num_steps

    @property
    def tokens_each(self) -> float:
        """Tokens of a decode in a step, drafts among them."""
        return self.num_decode_tokens / self.num_decodes

    @property
    def gain_each(self) -> float:
        """Tokens that a decode gains in a step."""
        return 1 + self.num_accepted / self.num_decodes

    @property
    def context_each(self) -> float:
        """Tokens that each token of a decode attends to."""
        return self.num_decode_context_tokens / self.num_decode_tokens

    @property
    def prefill_position(self) -> int:
        """About where in their prompts the chunks were."""
        return self.num_prefill_context_tokens // max(1, self.num_prefill_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    value: int
    reason: str


class BatchingOptimizer:
    """Watches steps and says which limits meet the target; with `auto_tune` also sets them, in `limits`.

    Every 64 steps with decodes it asks, from the fitted step times and the mean decode of these steps, what each
    setting should be. It changes only a limiting setting: one that makes steps too slow, or that makes prompts or
    requests wait while steps are faster than the target. `Hysteresis` decides whether the answer is given.

    Advice may exceed the configured value. The applied value may not: the memory was divided for it.
    """

    def __init__(
        self,
        limits: StepLimits,
        model: StepTimeModel,
        *,
        target_tpot_s: float,
        auto_tune: bool = False,
        num_speculative_tokens: int = 0,
    ) -> None:
        """`num_speculative_tokens`: as configured, 0 without speculation."""
        self.limits = limits
        """Limits in effect."""
        self._configured = limits
        self._model = model
        self._target_s = target_tpot_s
        self._auto_tune = auto_tune
        self._window = _Window()
        num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        # Never fewer tokens than places: every decode has its token.
        fewest = min(num_tokens, max(_MIN_BATCHED_TOKENS, num_seqs))
        self._current = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
        self._hysteresis = {
            "max_num_seqs": Hysteresis(num_seqs, low=1, high=_ADVICE_FACTOR * num_seqs),
            "max_num_batched_tokens": Hysteresis(num_tokens, low=fewest, high=_ADVICE_FACTOR * num_tokens),
        }
        if num_speculative_tokens:
            self._current["num_speculative_tokens"] = num_speculative_tokens
            hysteresis = Hysteresis(num_speculative_tokens, low=1, high=_ADVICE_FACTOR * num_speculative_tokens)
            self._hysteresis["num_speculative_tokens"] = hysteresis

    def observe(self, report: StepReport) -> tuple[Recommendation, ...]:
        """Take in a step that the model has seen already; returns those recommendations that are new with it."""
        if not report.sample.num_decodes:
            return ()
        self._window.add(report, self.limits)
        if self._window.num_steps < WINDOW:
            return ()
        window, self._window = self._window, _Window()
        return self._judge(window)

    def get_recommendations(self) -> list[Recommendation]:
        """Settings that should not be as they are configured. Empty while there is nothing to say."""
        return [
            self._recommendation(name)
            for name, hysteresis in self._hysteresis.items()
            if hysteresis.value != self._current[name]
        ]

    def _judge(self, window: _Window) -> tuple[Recommendation, ...]:
        proposals = {
            "max_num_seqs": self._proposal_for_seqs(window),
            "max_num_batched_tokens": self._proposal_for_tokens(window),
            "num_speculative_tokens": self._proposal_for_drafts(window),
        }
        given = {name: proposal for name, proposal in proposals.items() if proposal is not None}
        turned = [
            name for name, proposal in given.items() if self._hysteresis[name].propose(proposal.value, proposal.reason)
        ]
        if turned and self._auto_tune:
            self._apply()
        return tuple(self._recommendation(name) for name in turned)

    def _apply(self) -> None:
        values = {name: min(hysteresis.value, self._current[name]) for name, hysteresis in self._hysteresis.items()}
        self.limits = replace(self._configured, **values)

    def _recommendation(self, name: str) -> Recommendation:
        recommended, reason = self._hysteresis[name].value, self._hysteresis[name].reason
        if self._auto_tune:
            above = recommended > self._current[name]
            reason += "; auto-tune keeps to the configured value" if above else "; auto-tune has set it"
        return Recommendation(setting=name, current=self._current[name], recommended=recommended, reason=reason)

    # --- What each setting should be; None: no change ---

    def _proposal_for_seqs(self, window: _Window) -> _Proposal | None:
        fits = self._model.costs.decodes_within(
            _DECODE_SHARE * self._target_s * window.gain_each,
            context_tokens=window.context_each,
            tokens_each=window.tokens_each,
            most=_ADVICE_FACTOR * self._configured.max_num_seqs,
        )
        if fits == 0:
            return None  # not even one alone: fewer places would only make everybody wait
        length = f"{window.context_each:.0f} tokens"
        if window.mean_decodes > fits:
            time = _ms(self._model.predict(_decodes_of(window)) / window.gain_each)
            found = f"{window.mean_decodes:.0f} sequences of {length} take {time} from token to token"
            return _Proposal(value=fits, reason=f"{found}; {self._could(fits)}")
        if 2 * window.num_crowded > window.num_steps:
            found = f"requests of {length} wait for one of {self.limits.max_num_seqs} places"
            return _Proposal(value=max(fits, self.limits.max_num_seqs), reason=f"{found}; {self._could(fits)}")
        return None

    def _could(self, num_seqs: int) -> str:
        return f"{num_seqs} of them meet the target of {_ms(self._target_s)} with room for prompts"

    def _proposal_for_tokens(self, window: _Window) -> _Proposal | None:
        if window.num_full < _MIN_FULL_STEPS:
            return None
        decodes, limit_s = _decodes_of(window), self._target_s * window.gain_each
        # As the model has it, not as measured: a window has too few full steps for a mean.
        full_s = self._model.predict(_filled(decodes, self.limits.max_num_batched_tokens, window.prefill_position))
        if _SLACK * limit_s <= full_s <= limit_s:
            return None
        most = _ADVICE_FACTOR * self._configured.max_num_batched_tokens
        num_prefill_tokens = self._model.costs.prefill_tokens_within(
            limit_s, decodes, first_position=window.prefill_position, most=most
        )
        if num_prefill_tokens == 0:
            return None  # it is the decodes that take too long
        value = decodes.num_tokens + num_prefill_tokens
        found = f"full steps, with {decodes.num_decodes} decodes in them, take {_ms(full_s)}"
        could = f"with {value} tokens they would take the target of {_ms(limit_s)}"
        return _Proposal(value=value, reason=f"{found}, and {could}")

    def _proposal_for_drafts(self, window: _Window) -> _Proposal | None:
        hysteresis = self._hysteresis.get("num_speculative_tokens")
        drafted = window.tokens_each - 1
        if hysteresis is None or drafted < 0.5:
            return None
        accepted = window.gain_each - 1
        rate = _acceptance_rate(accepted, drafted)
        lengths = range(1, _ADVICE_FACTOR * self._current["num_speculative_tokens"] + 1)
        speeds = {length: self._speed(window, rate, length) for length in (*lengths, hysteresis.value)}
        best = max(speeds, key=lambda length: speeds[length])
        if speeds[best] < _WORTHWHILE * speeds[hysteresis.value]:
            best = hysteresis.value
        found = f"{accepted:.1f} of {drafted:.1f} drafted tokens are accepted"
        return _Proposal(value=best, reason=f"{found}, and {best} of them gain most for the time of a step")

    def _speed(self, window: _Window, rate: float, num_drafts: int) -> float:
        """Expected tokens per second of a decode with this number of drafts and this acceptance rate."""
        decodes = _decodes_of(window, 1 + num_drafts)
        return (1 + _expected_accepted(rate, num_drafts)) / self._model.predict(decodes)


def _decodes_of(window: _Window, tokens_each: float | None = None) -> StepShape:
    """A step of nothing but the mean decodes of a window."""
    num_tokens = round(window.mean_decodes * (window.tokens_each if tokens_each is None else tokens_each))
    return StepShape(
        num_decodes=round(window.mean_decodes),
        num_tokens=num_tokens,
        num_context_tokens=round(num_tokens * window.context_each),
    )


def _filled(decodes: StepShape, num_tokens: int, prefill_position: int) -> StepShape:
    """A step with these decodes and, up to `num_tokens`, prompts."""
    num_prefill_tokens = max(0, num_tokens - decodes.num_tokens)
    return StepShape(
        num_decodes=decodes.num_decodes,
        num_tokens=decodes.num_tokens + num_prefill_tokens,
        num_context_tokens=decodes.num_context_tokens + num_prefill_tokens * prefill_position,
    )


def _expected_accepted(rate: float, num_drafts: float) -> float:
    """Drafts before the first wrong one, if each is right with probability `rate`."""
    return num_drafts if rate >= 1 else rate * (1 - rate**num_drafts) / (1 - rate)


def _acceptance_rate(num_accepted: float, num_drafts: float) -> float:
    """The inverse of `_expected_accepted`, by bisection: it grows with the rate."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected_accepted(middle, num_drafts) < num_accepted else (low, middle)
    return low


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
