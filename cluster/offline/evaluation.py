"""Evaluation of a model on a text: its perplexity, and its distance from a reference, by prompts' log-probabilities."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.outputs import Logprob, RequestOutput
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.parameters import ALL_LOGPROBS
from holdfast.worker.sampling_params import SamplingParams

MAX_AT_ONCE: Final = 2**22
"""Log-probabilities of a window."""

_TOGETHER: Final = 2**20
"""Log-probabilities of windows that run together; each takes 0.3 KB."""

_ROUNDING: Final = 1e-6
"""A share of the probability below it is rounding: log-probabilities are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Divergence of a model from its reference: means over all scored tokens."""

    kl: float
    """Kullback-Leibler divergence of the model from the reference, nats a token."""
    same_first: float
    """Share of tokens whose likeliest one is the reference's."""
    top: int
    """The likeliest tokens that are compared one by one; -1: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model on a text."""

    num_tokens: int
    """Scored tokens: all but the first of each window."""
    mean_nll: float
    """Mean negative log-probability of the text's tokens, in nats."""
    reference_mean_nll: float | None = None
    divergence: Divergence | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability of a token."""
        return math.exp(self.mean_nll)


def windows_of(prefix: Sequence[int], token_ids: Sequence[int], context: int) -> list[list[int]]:
    """The text in prompts of at most `context` tokens, one after the other, each behind `prefix`. A chunk without a
    token to score is left out.
    """
    step = context - len(prefix)
    windows = [[*prefix, *token_ids[start : start + step]] for start in range(0, len(token_ids), step)]
    return [window for window in windows if len(window) > 1]


def check_sizes(context: int, top: int, vocab_size: int, longest: int, prefix: int = 0) -> None:
    """Raises `ConfigurationError` for windows that the model does not take, or whose log-probabilities are too many."""
    if not prefix + 2 <= context < longest:
        raise ConfigurationError(
            f"--context {context}: must be from {prefix + 2} to {longest - 1}, one less than the longest sequence"
        )
    pairs = vocab_size if top == ALL_LOGPROBS else top
    if context * pairs > MAX_AT_ONCE:
        raise ConfigurationError(
            f"--context {context}: with {pairs} log-probabilities a token, the maximum is {MAX_AT_ONCE // pairs} "
            f"tokens at a time; lower --context or --top"
        )


def evaluate(
    engine: InferenceEngine,
    windows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
    reference: InferenceEngine | None = None,
    top: int = 0,
) -> Evaluation:
    """Scores the windows; `top` log-probabilities a token are compared with the reference's. `progress` gets windows
    done and in all.
    """
    total, of_reference, kl, same = _Sum(), _Sum(), _Sum(), 0
    engines = [engine] if reference is None else [engine, reference]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0 if reference is None else top)
    vocab_size = engine.info.vocab_size
    for done, outputs in _outputs(engines, windows, params, vocab_size):
        ours, *others = map(_positions, outputs)
        for own in ours:
            total.add(-_first(own))
        for theirs in others:
            for own, other in zip(ours, theirs, strict=True):
                of_reference.add(-_first(other))
                kl.add(divergence(_by_id(other), _by_id(own), vocab_size))
                same += _likeliest(own) == _likeliest(other)
        progress(done, len(windows))
    if reference is None:
        return Evaluation(num_tokens=total.count, mean_nll=total.mean)
    found = Divergence(kl=kl.mean, same_first=same / kl.count, top=top)
    return Evaluation(
        num_tokens=total.count, mean_nll=total.mean, reference_mean_nll=of_reference.mean, divergence=found
    )


def divergence(reference: Mapping[int, float], other: Mapping[int, float], vocab_size: int) -> float:
    """Kullback-Leibler divergence of `other` from `reference`, by log-probabilities of tokens, in nats.

    Tokens that are missing from either list count as one token, with the remaining probability. So the divergence is
    exact if all tokens are there, and otherwise a lower bound.
    """
    both = reference.keys() & other.keys()
    of_reference = {token: math.exp(reference[token]) for token in both}
    known = math.fsum(share * (reference[token] - other[token]) for token, share in of_reference.items())
    if len(both) == vocab_size:
        return known
    left = 1 - math.fsum(of_reference.values())
    left_of_other = 1 - math.fsum(math.exp(other[token]) for token in both)
    if min(left, left_of_other) < _ROUNDING:
        return known
    return known + left * math.log(left / left_of_other)


class _Sum:
    """A sum of numbers, exact but for one rounding of each part."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self._sum += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self._sum / self.count


def _outputs(
    engines: Sequence[InferenceEngine], windows: Sequence[Sequence[int]], params: SamplingParams, vocab_size: int
) -> Iterator[tuple[int, list[RequestOutput]]]:
    """Number of windows done and each engine's output, for each window. As many run together as may be in flight."""
    assert params.prompt_logprobs is not None, "they are the requested values"
    pairs = vocab_size if params.prompt_logprobs == ALL_LOGPROBS else 1 + params.prompt_logprobs
    at_once = max(1, _TOGETHER // (pairs * max(map(len, windows)) * len(engines)))
    for start in range(0, len(windows), at_once):
        batch = windows[start : start + at_once]
        handles = [[engine.submit_request(list(window), params) for engine in engines] for window in batch]
        for number, of_window in enumerate(handles, start=start + 1):
            yield number, [handle.result() for handle in of_window]


_Position = Mapping[int, Logprob]


def _positions(output: RequestOutput) -> list[_Position]:
    """Log-probability of each scored token, then those of the likeliest ones."""
    assert output.prompt_logprobs is not None, "they were asked for"
    return [one for one in output.prompt_logprobs if one is not None]


def _first(position: _Position) -> float:
    return next(iter(position.values())).logprob


def _by_id(position: _Position) -> dict[int, float]:
    return {token: one.logprob for token, one in position.items()}


def _likeliest(position: _Position) -> int:
    return max(position, key=lambda token: (position[token].logprob, -token))
