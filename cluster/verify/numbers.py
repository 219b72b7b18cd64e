"""Health of a server's numbers: perplexity of fixed texts beside a reference, one token for every prompt, NaN.

A reference is this audit's measurements on another server, as a JSON object.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.cluster.verify.exchange import Answer, Token
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.material import TEXTS
from holdfast.cluster.verify.subject import Api, Feature, Steps, Subject, alone

_SHORTEST_RUN: Final = 12  # characters
_FEWEST_PROMPTS: Final = 4  # prompts with long outputs
_MIN_LOGPROB: Final = -1000.0
"""Below it a log-probability of a chosen token is a mark for something else."""


def measure(subject: Subject, api: Api, into: dict[str, Any]) -> Steps:
    """Perplexity of each fixed text, as nats and characters, and the greedy answers to it with their log-probabilities.

    Where a server has no log-probabilities of prompts, `into` has the answers alone.
    """
    has_echo = subject.can(api, Feature.ECHO) and subject.can(api, Feature.LOGPROBS)
    for name, text in TEXTS.items():
        entry = into.setdefault(name, {})
        if has_echo:
            (answer,) = yield [subject.ask(api, text, logprobs=True, echo=True, max_tokens=1)]
            if answer.is_ok and (nats := nats_of(answer, text)) is not None:
                entry["nats_per_character"] = nats / len(text)
        (answer,) = yield from alone([subject.ask(api, text, logprobs=True)])
        if answer.is_ok:
            entry[f"answer of {api.value}"] = answer.choice.text
            if answer.choice.tokens:
                entry[f"logprobs of {api.value}"] = [token.logprob for token in answer.choice.tokens]


def nats_of(answer: Answer, text: str) -> float | None:
    """Negative log-likelihood of the text's tokens after the first, in nats; None: they are not listed."""
    tokens = _of_prompt(answer.choice.tokens, text)
    values = [token.logprob for token in tokens if token.logprob is not None]
    if len(values) < 2 or any(not math.isfinite(value) for value in values):
        return None
    return -math.fsum(values)


def _of_prompt(tokens: Sequence[Token], text: str) -> Sequence[Token]:
    """Tokens up to the end of the text; a mark of its beginning is among them."""
    length, found = 0, []
    for token in tokens:
        if length >= len(text):
            break
        found.append(token)
        length += len(token.text) if token.text in text else 0
    return found if length >= len(text) - 1 else []


def compare(subject: Subject, measured: Mapping[str, Any], reference: Mapping[str, Any], tolerance: float) -> None:
    """Findings where a text's perplexity is another one than the reference's, by more than a share of it."""
    for name, entry in measured.items():
        own, other = (one.get("nats_per_character") for one in (entry, reference.get(name, {})))
        if own is None or not other:
            continue
        subject.num_compared += 1
        if abs(own / other - 1) > tolerance:
            about = f"{name}: {own:.4f} nats a character, and {other:.4f} at the reference ({own / other - 1:+.1%})"
            cause = (
                "precision: weights or keys and values that drift" if abs(own / other - 1) < 0.2 else "other weights"
            )
            subject.found("numbers.perplexity", Kind.FAULT, about, cause=cause, gap=abs(own - other))
    if not any("nats_per_character" in entry for entry in measured.values()):
        subject.found("numbers.missing", Kind.NOTE, "log-probabilities of a prompt (echo) are not offered")


def smells(subject: Subject, answers: Sequence[Answer]) -> None:
    """Findings that numbers leave behind which have gone wrong, over all answers of an audit."""
    _not_finite(subject, answers)
    _one_token(subject, answers)


def _not_finite(subject: Subject, answers: Sequence[Answer]) -> None:
    seen = [answer for answer in answers if answer.is_ok and (answer.num_not_finite or _has_strange(answer))]
    if seen:
        about = "log-probabilities that are NaN, infinite, or no numbers"
        subject.found("numbers.not-finite", Kind.FAULT, about, seen[0], num_seen=len(seen), num_tried=len(answers))


def _has_strange(answer: Answer) -> bool:
    """Whether a chosen token has no log-probability, or an impossible one; the first token of a prompt has none."""
    first = 1 if answer.ask.params.get("echo") else 0
    values = [token.logprob for choice in answer.choices for token in choice.tokens[first:]]
    return any(value is None or not math.isfinite(value) or value < _MIN_LOGPROB for value in values)


def _one_token(subject: Subject, answers: Sequence[Answer]) -> None:
    """The same run of one character in the answers to most prompts: `!!!!!!!!`."""
    texts = {_prompt_of(one): (one, one.choice.text.strip()) for one in answers if one.is_ok and _is_free(one)}
    long = {prompt: (one, text) for prompt, (one, text) in texts.items() if len(text) >= _SHORTEST_RUN}
    runs = Counter(text[0] for _, text in long.values() if len(set(text)) == 1)
    character, number = runs.most_common(1)[0] if runs else ("", 0)
    if len(long) >= _FEWEST_PROMPTS and 2 * number >= len(long):
        shown = next(one for one, text in long.values() if set(text) == {character})
        about = f"{number} of {len(long)} prompts are answered by {character * 4} without an end"
        subject.found("numbers.repeated-token", Kind.FAULT, about, shown, cause="logits that are NaN, or equal")


def _is_free(answer: Answer) -> bool:
    params = answer.ask.params
    return not any(key in params for key in ("echo", "response_format", "tools", "stop"))


def _prompt_of(answer: Answer) -> str:
    return str(answer.ask.params.get("prompt") or answer.ask.params.get("messages"))
