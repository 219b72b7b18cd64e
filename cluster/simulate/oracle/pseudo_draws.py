"""Sampler of the simulator's pseudo-model: what a plan's parameters do to its scores, in the order of the real sampler.

What may live here: one row's draw, and its log-probabilities. What may not: blocks (`pseudo_runner.py`), and the
request, of which a runner knows nothing but what the plan says.
"""

from collections import Counter
from collections.abc import Sequence

from holdfast.cluster.simulate.oracle.pseudo_grammar import allows
from holdfast.cluster.simulate.oracle.pseudo_model import VOCAB_SIZE, likelihoods, logprob, scores
from holdfast.worker.plan.draws import banned_token_ids
from holdfast.worker.plan.logits_settings import LogitsSettings
from holdfast.worker.plan.step_plan import DrawParams
from holdfast.worker.request import TokenLogprob

_OUT = float("-inf")


def drawn_token(prefix: bytes, params: DrawParams, mask: bytes | None) -> int:
    """What is drawn after `prefix`; `mask` is that of a grammar."""
    is_greedy = params.temperature == 0
    raw = likelihoods(prefix) if is_greedy else scores(prefix, params.seed, params.first_output_index)
    if params.logits_settings is None:
        return raw.index(max(raw))
    row = [score / 16 - 8 for score in raw]
    if mask is not None:
        row = [value if allows(mask, token_id) else _OUT for token_id, value in enumerate(row)]
    row = _ban(_keep_allowed(row, params.logits_settings), banned_token_ids(params))
    for token_id, bias in params.logits_settings.logit_bias:
        row[token_id] += bias
    if params.logits_settings.penalize:
        _penalize(row, params.logits_settings, Counter(params.output_token_ids))
    return row.index(max(row))


def token_logprob(prefix: bytes, token_id: int, num_logprobs: int, chosen: Sequence[int] = ()) -> TokenLogprob:
    """What the model says of a token after `prefix`, and of so many of the likeliest ones, or of `chosen` ones."""
    values = likelihoods(prefix)
    order = sorted(range(VOCAB_SIZE), key=lambda other: (-values[other], other))
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob(values[token_id]),
        rank=order.index(token_id) + 1,
        top=tuple((other, logprob(values[other])) for other in chosen or order[:num_logprobs]),
    )


def _keep_allowed(row: list[float], logits_settings: LogitsSettings) -> list[float]:
    """The row with the allowed tokens alone, unless its grammar allows none of them."""
    if logits_settings.allowed_token_ids is None:
        return row
    kept = [value if token_id in logits_settings.allowed_token_ids else _OUT for token_id, value in enumerate(row)]
    return row if max(kept) == _OUT else kept


def _ban(row: list[float], token_ids: list[int]) -> list[float]:
    """The row without some tokens, unless they are all that it has."""
    kept = list(row)
    for token_id in token_ids:
        kept[token_id] = _OUT
    return row if max(kept) == _OUT else kept


def _penalize(row: list[float], logits_settings: LogitsSettings, counts: Counter[int]) -> None:
    for token_id in counts.keys() | set(logits_settings.prompt_token_ids):
        factor = logits_settings.repetition_penalty
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id, count in counts.items():
        row[token_id] -= logits_settings.frequency_penalty * count + logits_settings.presence_penalty
