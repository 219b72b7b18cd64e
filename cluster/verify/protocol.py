"""Protocol of a server: how its streams are built, statuses of errors, cancelled requests, limits."""

from collections.abc import Sequence
from typing import Any, Final

from holdfast.cluster.verify.exchange import Answer, Ask
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.subject import Answers, Api, Feature, Steps, Subject, alone

_REFUSED: Final = (400, 422)  # HTTP statuses
_LONG: Final = 512  # tokens
_SLOWER: Final = 4.0  # times the request before
_AT_LEAST_S: Final = 1.0
_TRIES: Final = 5  # requests after others were cancelled
_LONGEST_PROMPT: Final = 40_000
"""Tokens of a prompt that are sent at most to see that too many are refused."""


def streams(subject: Subject, api: Api) -> Steps:
    """The form of a stream: one id, one end for each choice, its mark at the end, and no event of an unknown form."""
    if not subject.can(api, Feature.STREAM):
        return
    answers = yield [subject.streamed(subject.ask(api, one.text)) for one in subject.prompts()]
    if subject.can(api, Feature.SEVERAL):
        answers += yield [subject.streamed(subject.ask(api, subject.prompts()[0].text, n=2))]
    subject.examine("streams.unfinished", "a stream ends with a finish reason and [DONE]", answers, _unfinished)
    subject.examine("streams.form", "a stream is events of one answer", answers, _other_form)


def _unfinished(answer: Answer) -> str:
    number = int(answer.ask.params.get("n") or 1)
    finishes = [choice.num_finishes for choice in answer.choices]
    if len(finishes) < number or 0 in finishes:
        return f"{sum(map(bool, finishes))} of {number} choices ended"
    return "" if answer.is_done else "no [DONE]"


def _other_form(answer: Answer) -> str:
    if answer.problems:
        return answer.problems[0]
    if len(answer.ids) > 1:
        return f"{len(answer.ids)} ids"
    ended = max(choice.num_finishes for choice in answer.choices)
    return f"{ended} finish reasons for a choice" if ended > 1 else ""


def errors(subject: Subject, api: Api) -> Steps:
    """Requests that are wrong get an error of the caller's, with a message, and not a success or a server's error."""
    cases = _wrong_requests(subject, api)
    answers = yield from alone(ask for _, ask, _ in cases)
    subject.num_compared += len(answers)
    for (about, _, statuses), answer in zip(cases, answers, strict=True):
        expected = f"{about}: {' or '.join(map(str, statuses))}"
        if answer.status >= 500 or answer.status == 0:
            subject.found(
                "errors.status", Kind.FAULT, f"{expected}, and not {answer.status}", answer, expected=expected
            )
        elif answer.status not in statuses:
            subject.found(
                "errors.accepted", Kind.DIFFERENCE, f"{expected}, and not {answer.status}", answer, expected=expected
            )
        elif not answer.message:
            subject.found("errors.message", Kind.NOTE, f"{about}: the error has no message", answer)


def _wrong_requests(subject: Subject, api: Api) -> list[tuple[str, Ask, tuple[int, ...]]]:
    good = dict(subject.ask(api, f"Wrong {subject.nonce}", max_tokens=2).params)

    def changed(**changes: Any) -> Ask:
        return Ask(path=api.value, body=good | changes, is_valid=False)

    missing = {key: value for key, value in good.items() if key not in ("prompt", "messages")}
    wrong_key = ("a wrong key", Ask(path=api.value, body=good, is_valid=False, has_wrong_key=True), (401, 403))
    return [
        *([wrong_key] if subject.has_key else []),
        ("a body that is not JSON", Ask(path=api.value, body=b'{"model": ', is_valid=False), _REFUSED),
        ("a body without a prompt", Ask(path=api.value, body=missing, is_valid=False), _REFUSED),
        ("a temperature that is a text", changed(temperature="hot"), _REFUSED),
        ("a negative temperature", changed(temperature=-1), _REFUSED),
        ("top_p of 7", changed(top_p=7), _REFUSED),
        ("n of 0", changed(n=0), _REFUSED),
        ("a model that is not served", changed(model=f"no-such-model-{subject.nonce}"), (404, 400)),
        ("a path that is not there", Ask(path=f"nothing-{subject.nonce}", body=good, is_valid=False), (404, 405)),
    ]


def limits(subject: Subject, api: Api) -> Steps:
    """A prompt longer than the context is refused by the caller's fault, and not cut off without a word."""
    length = subject.max_model_len
    if length is None or length > _LONGEST_PROMPT:
        return
    prompt = f"{subject.nonce} " + "one two three four five six seven " * (length // 4)
    answers = yield [subject.ask(api, prompt, max_tokens=2)]
    (answer,) = answers
    subject.num_compared += 1
    expected = f"a prompt beyond {length} tokens: 400"
    if answer.is_ok:
        prompt_tokens = answer.tokens_of("prompt")
        about = f"a prompt of more than {length} tokens was accepted, as one of {prompt_tokens}"
        kind = Kind.FAULT if prompt_tokens is not None and prompt_tokens <= length else Kind.DIFFERENCE
        subject.found("limits.prompt-cut", kind, about, answer, expected=expected)
    elif answer.status not in (*_REFUSED, 413):
        subject.found("limits.status", Kind.FAULT, f"{expected}, and not {answer.status}", answer, expected=expected)


def cancellations(subject: Subject, api: Api) -> Steps:
    """Requests of clients that have left make room: a later request does not wait for them.

    Seen by queueing alone, so it takes several tries in a row, each slower than the request right before it. Of a
    server, or a network, that is slow for other reasons, both are slow, or not in each try.
    """
    if not subject.can(api, Feature.STREAM):
        return
    tries: list[tuple[Answer, Answer]] = []
    while len(tries) < _TRIES:
        before, after = yield from _around_cancelled(subject, api, len(tries))
        if not (before.is_ok and after.is_ok):
            return
        subject.num_compared += 1
        tries.append((before, after))
        if not _waits_longer(before, after):
            return
    before, after = min(tries, key=lambda one: one[1].total_s - one[0].total_s)
    about = (
        f"after cancelled requests a short one took {after.total_s:.2f} s or more, and {before.total_s:.2f} s before"
    )
    subject.found(
        "cancel.slot-kept",
        Kind.FAULT,
        about,
        after,
        num_seen=_TRIES,
        num_tried=_TRIES,
        cause="cancelled work goes on",
    )


def _around_cancelled(subject: Subject, api: Api, number: int) -> Answers:
    """A short request before long ones that are cancelled, and one after them. Another one waits for what is left of
    the try before.
    """
    first, before, after = (subject.ask(api, f"Short {subject.nonce}-{number}-{n}", max_tokens=4) for n in range(3))
    yield [first]
    answers = yield [before]
    long = subject.company(api, subject.sizes.company, max_tokens=_LONG, ignore_eos=True)
    yield [_cut(subject, ask) for ask in long]
    answers += yield [after]
    return answers


def _waits_longer(before: Answer, after: Answer) -> bool:
    return after.total_s > max(_SLOWER * before.total_s, before.total_s + _AT_LEAST_S)


def _cut(subject: Subject, ask: Ask) -> Ask:
    streamed = subject.streamed(ask)
    return Ask(path=streamed.path, body=streamed.body, cut_after=1)


def server_errors(subject: Subject, answers: Sequence[Answer]) -> None:
    """Errors of the server's own at requests that it should have answered, over the whole audit."""
    valid = [answer for answer in answers if answer.ask.is_valid]
    broken = [
        one for one in valid if (one.status >= 500 and one.status not in (501, 503)) or (one.status == 0 or one.error)
    ]
    refused = [one for one in valid if one.status in (429, 503)]
    for name, kind, seen in (("server.errors", Kind.FAULT, broken), ("server.refused", Kind.NOTE, refused)):
        if seen:
            first = seen[0]
            about = f"{first.status or 'no answer'} {first.message}"
            subject.found(name, kind, about, first, num_seen=len(seen), num_tried=len(valid))
