"""Checks of a model beside others: adapters, and faults of the server while streams are open."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.cluster.verify.compare import first_difference
from holdfast.cluster.verify.exchange import Answer
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.purity import HOT, Known, Situation
from holdfast.cluster.verify.subject import Api, During, Steps, Subject, alone

VARIANTS: Final[Sequence[Mapping[str, Any]]] = ({}, {"temperature": HOT, "seed": 1000})
"""Parameters of a request: at temperature 0, and drawn with a seed."""

_LONG: Final = 6
"""Factor on the usual number of tokens, for streams that stay open during an event."""


def adapters(subject: Subject, api: Api) -> Steps:
    """Models that share one server: each answers as it does alone, those of zero effect as the base model."""
    names = (subject.model, *subject.adapters, *subject.zero_adapters)
    if len(names) < 2:
        return
    wishes = [(one.text, params) for one in subject.prompts() for params in VARIANTS]
    alone_by_name: dict[str, list[Answer]] = {}
    for name in names:
        asks = [subject.ask(api, text, logprobs=True, model=name, **params) for text, params in wishes]
        alone_by_name[name] = yield from alone(asks)
    mixed = yield [answer.ask for answers in zip(*alone_by_name.values(), strict=True) for answer in answers]
    _judge_mixed(subject, names, alone_by_name, mixed)
    _judge_effects(subject, alone_by_name)


def _judge_mixed(
    subject: Subject, names: Sequence[str], by_name: dict[str, list[Answer]], mixed: Sequence[Answer]
) -> None:
    """A name's answer in company that is another name's answer alone: they were exchanged."""
    own = {id(answer): by_name[names[n % len(names)]][n // len(names)] for n, answer in enumerate(mixed)}
    rest = {id(answer): [by_name[name][n // len(names)] for name in names] for n, answer in enumerate(mixed)}

    def exchanged(answer: Answer) -> str:
        if not own[id(answer)].is_ok or answer.choice.full == own[id(answer)].choice.full:
            return ""
        is_others = any(one.is_ok and one.choice.full == answer.choice.full for one in rest[id(answer)])
        return f"{answer.ask.params['model']} answered as another model" if is_others else ""

    subject.examine("adapters.swapped", "each model answers as it does alone, beside the others", mixed, exchanged)


def _judge_effects(subject: Subject, by_name: dict[str, list[Answer]]) -> None:
    base = by_name[subject.model]
    for name in (*subject.adapters, *subject.zero_adapters):
        pairs = [(one, two) for one, two in zip(base, by_name[name], strict=True) if one.is_ok and two.is_ok]
        other = [two for one, two in pairs if first_difference(one.choice, two.choice)]
        same_numbers = all(_values(one) == _values(two) for one, two in pairs)
        if name in subject.zero_adapters and other:
            about = f"{name} is to have no effect, and answers otherwise than {subject.model}"
            subject.found(
                "adapters.zero-differs", Kind.DIFFERENCE, about, other[0], num_seen=len(other), num_tried=len(pairs)
            )
        if name in subject.adapters and pairs and not other and same_numbers:
            about = f"{name} answers every prompt as {subject.model}"
            subject.found(
                "adapters.no-effect", Kind.FAULT, about, pairs[0][1], num_seen=len(pairs), num_tried=len(pairs)
            )


def _values(answer: Answer) -> list[float | None]:
    return [token.logprob for token in answer.choice.tokens]


def during(subject: Subject, api: Api) -> Steps:
    """Streams that are open while a command ends a part of the server: all of them go on as if nothing had been."""
    number = _LONG * subject.sizes.num_tokens
    wishes = [(one.text, params) for one in subject.prompts() for params in VARIANTS]
    asks = [subject.streamed(subject.ask(api, text, max_tokens=number, **params)) for text, params in wishes]
    before = yield from alone(asks)
    known = [Known(answer.ask, False, [answer] if answer.is_ok else []) for answer in before]
    found = yield During(asks)
    judge, lost = Situation("during", known), [answer for answer in found if not answer.is_ok]
    for n, answer in enumerate(found):  # as many rounds of `asks` as the command took
        one = known[n % len(known)]
        judge.judge(one, answer, [text for other in known if other is not one for text in other.texts])
    judge.report(subject, "failover")
    if lost:
        about = f"a stream was lost: {lost[0].status} {lost[0].message}"
        subject.found("failover.lost", Kind.FAULT, about, lost[0], num_seen=len(lost), num_tried=len(found))
