"""Semantics of an answer: how it ends, stop strings, usage, echo, log-probabilities, characters that are cut."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from holdfast.cluster.verify.exchange import Answer, Ask, Choice
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.material import UNICODE
from holdfast.cluster.verify.subject import Api, Feature, Steps, Subject, alone

FINISHES: Final = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_SHORT: Final = 5  # tokens
_SUM_TOLERANCE: Final = 1e-3  # of log-probabilities and of sums of probabilities
_TIE: Final = 1e-3  # nats
_REPLACEMENT: Final = "\ufffd"
_MAX_CUTS: Final = 12  # stop strings tried


def finishes(subject: Subject, api: Api) -> Steps:
    """Finish reasons and usage: an answer that was cut off by `max_tokens` says so, and its counts agree."""
    prompts = [one.text for one in subject.prompts()]
    whole = yield from alone(subject.ask(api, text) for text in prompts)
    short = yield from alone(subject.ask(api, text, max_tokens=_SHORT) for text in prompts)
    again = yield from alone(subject.ask(api, text + " " + text, max_tokens=_SHORT) for text in prompts[:2])
    longer = {id(one): full for one, full in zip(short, whole, strict=True)}
    subject.examine("finish.wrong", "the finish reason says how an answer ended", [*whole, *short], _unknown_finish)
    subject.examine(
        "finish.wrong",
        "an answer that max_tokens cut off ends with length",
        short,
        lambda answer: _wrong_end(answer, longer[id(answer)]),
    )
    subject.examine(
        "usage.wrong", "usage counts the tokens of prompt and answer", [*whole, *short, *again], wrong_usage
    )
    _longer_prompts_count_more(subject, short, again)
    if subject.can(api, Feature.STREAM):
        yield from _streamed_usage(subject, [one for one in short if one.is_ok and one.usage])


def _unknown_finish(answer: Answer) -> str:
    bad = [choice.finish_reason for choice in answer.choices if choice.finish_reason not in FINISHES]
    return f"finish_reason {bad[0]!r}" if bad else ""


def _wrong_end(short: Answer, whole: Answer) -> str:
    said, text = short.choice.finish_reason, short.choice.full
    count = short.tokens_of("completion")
    if said == "length" and count is not None and count < _SHORT:
        return f"{said!r} after {count} of {_SHORT} tokens"
    went_on = whole.is_ok and len(whole.choice.full) > len(text.rstrip(_REPLACEMENT)) + 1
    if said != "length" and went_on and whole.choice.full.startswith(text.rstrip(_REPLACEMENT)):
        return f"{said!r}, and the answer goes on with more tokens"
    return ""


def wrong_usage(answer: Answer) -> str:
    """Says which count is wrong; empty: none."""
    if not answer.usage:
        return "no usage is reported"
    prompt, completion, total = (answer.tokens_of(kind) for kind in ("prompt", "completion", "total"))
    if prompt is None or completion is None or total != prompt + completion:
        return f"{prompt} + {completion} is not {total}"
    most = answer.ask.num_tokens
    all_cut = all(choice.finish_reason == "length" for choice in answer.choices)
    if completion > most or (all_cut and completion != most):
        return f"completion_tokens {completion}, and max_tokens made it {most}"
    if prompt < 1:
        return f"prompt_tokens {prompt}"
    if tokens := [len(choice.tokens) for choice in answer.choices if choice.tokens]:
        return "" if abs(sum(tokens) - completion) <= len(tokens) else f"{completion}, with {sum(tokens)} tokens listed"
    return ""


def _longer_prompts_count_more(subject: Subject, short: Sequence[Answer], again: Sequence[Answer]) -> None:
    before = {id(two): one.tokens_of("prompt") for one, two in zip(short, again, strict=False)}
    subject.examine(
        "usage.wrong",
        "a prompt that is sent twice in one counts more tokens",
        [answer for answer in again if answer.usage],
        lambda answer: (
            f"{before[id(answer)]} once, {answer.tokens_of('prompt')} twice"
            if (before[id(answer)] or 0) >= (answer.tokens_of("prompt") or 0)
            else ""
        ),
    )


def _streamed_usage(subject: Subject, whole: Sequence[Answer]) -> Steps:
    streamed = yield from alone(subject.streamed(answer.ask) for answer in whole)
    whole_of = {id(two): one for one, two in zip(whole, streamed, strict=True)}
    if silent := [one for one in streamed if one.is_ok and not one.usage]:
        subject.found("usage.missing", Kind.NOTE, "streams do not tell their usage (include_usage)", silent[0])
    kinds = ("prompt", "completion", "total")
    subject.examine(
        "usage.wrong",
        "a stream's usage equals that of the whole answer",
        [one for one in streamed if one.is_ok and one.usage and one.choice.full == whole_of[id(one)].choice.full],
        lambda answer: next(
            (
                f"{kind}_tokens {answer.tokens_of(kind)} and {whole_of[id(answer)].tokens_of(kind)}"
                for kind in kinds
                if answer.tokens_of(kind) != whole_of[id(answer)].tokens_of(kind)
            ),
            "",
        ),
    )


def stops(subject: Subject, api: Api) -> Steps:
    """Stop strings over the border of two tokens: the answer ends before their first place, streamed or not."""
    whole = yield from alone(subject.ask(api, one.text, logprobs=True) for one in subject.prompts())
    cases = [(answer, stop) for answer in whole if answer.is_ok for stop in _stops_of(answer.choice)[:2]]
    yield from _stopped(subject, cases, lambda ask: ask)
    if subject.can(api, Feature.STREAM):
        yield from _stopped(subject, cases, subject.streamed)


def _stopped(subject: Subject, cases: Sequence[tuple[Answer, str]], form: Callable[[Ask], Ask]) -> Steps:
    asks = [Ask(path=one.ask.path, body=_plain(one) | {"stop": [stop]}) for one, stop in cases]
    found = yield from alone(form(ask) for ask in asks)
    expected = {id(answer): case for answer, case in zip(found, cases, strict=True)}
    subject.examine(
        "stop.ignored",
        "an answer ends before its stop string",
        found,
        lambda answer: _ignored_stop(answer, expected[id(answer)][1]),
    )
    subject.examine(
        "stop.wrong-place",
        "an answer with a stop string is what stands before it",
        found,
        lambda answer: _wrong_place(answer, *expected[id(answer)]),
    )


def _plain(answer: Answer) -> dict[str, object]:
    return {key: value for key, value in answer.ask.params.items() if key not in ("logprobs", "top_logprobs")}


def _stops_of(choice: Choice) -> list[str]:
    """Strings over the border of two tokens, whose first place in the text is that border."""
    text, found = choice.text, []
    for border in accumulate(len(token.text) for token in choice.tokens) if choice.tokens else range(6, len(text), 5):
        stop = text[max(0, border - 2) : border + 2]
        is_plain = len(stop) == 4 and stop.strip() == stop and _REPLACEMENT not in stop
        if border > 4 and is_plain and not choice.reasoning and text.find(stop) == border - 2:
            found.append(stop)
    return found


def _ignored_stop(answer: Answer, stop: str) -> str:
    return f"{stop!r} is in the text" if stop in answer.choice.text else ""


def _wrong_place(answer: Answer, whole: Answer, stop: str) -> str:
    full, text = whole.choice.text, answer.choice.text
    expected = full[: full.index(stop)]
    if text == expected:
        said = answer.choice.finish_reason
        return "" if said == "stop" else f"finish_reason {said!r} where the stop string ended it"
    is_impure = not full.startswith(text) and not text.startswith(expected)
    return "" if is_impure or stop in text else f"{text[-20:]!r} at the end, and not {expected[-20:]!r}"


def echoes(subject: Subject, api: Api) -> Steps:
    """`echo`: the text begins with the prompt, and continues as without it."""
    if not subject.can(api, Feature.ECHO):
        return
    prompts = [one.text for one in subject.prompts()[:2]]
    plain = yield from alone(subject.ask(api, text) for text in prompts)
    echoed = yield from alone(subject.ask(api, text, echo=True) for text in prompts)
    texts = {id(two): (text, one) for text, one, two in zip(prompts, plain, echoed, strict=True)}
    subject.examine(
        "echo.wrong",
        "an echoed answer begins with its prompt",
        echoed,
        lambda answer: (
            "" if answer.choice.text.startswith(texts[id(answer)][0]) else f"begins {answer.choice.text[:30]!r}"
        ),
    )
    subject.examine(
        "echo.other-text",
        "an echoed answer continues as the same answer without its prompt",
        echoed,
        lambda answer: _other_continuation(answer.choice.text, *texts[id(answer)]),
        Kind.DIFFERENCE,
    )


def _other_continuation(text: str, prompt: str, plain: Answer) -> str:
    if not plain.is_ok or not text.startswith(prompt):
        return ""
    found, expected = text.removeprefix(prompt).strip(), plain.choice.text.strip()  # a first space may be the prompt's
    return "" if found == expected else f"{found[:40]!r}, and without echo {expected[:40]!r}"


def logprobs(subject: Subject, api: Api) -> Steps:
    """Log-probabilities: one per token, finite, of at most 1 in sum, with the chosen token as the most likely."""
    if not subject.can(api, Feature.LOGPROBS):
        return
    answers = yield from alone(subject.ask(api, one.text, logprobs=True) for one in subject.prompts())
    top = subject.sizes.num_top
    subject.examine(
        "logprobs.truncated",
        "each token has its log-probability and those of the likeliest ones",
        answers,
        lambda answer: _truncated(answer, top, api),
    )
    subject.examine("logprobs.sum", "probabilities are at most 1, and so is their sum", answers, _too_probable)
    subject.examine(
        "logprobs.not-chosen",
        "at temperature 0 the chosen token is the likeliest",
        answers,
        _not_chosen,
        Kind.DIFFERENCE,
    )
    subject.examine("logprobs.text", "the listed tokens make the text", answers, _other_text, Kind.DIFFERENCE)


def _truncated(answer: Answer, top: int, api: Api) -> str:
    count, tokens = answer.tokens_of("completion"), answer.choice.tokens
    if count is not None and len(tokens) < count - (answer.choice.finish_reason != "length"):
        return f"{len(tokens)} of {count} tokens"
    fewest, most = (pick((len(token.top) for token in tokens), default=0) for pick in (min, max))
    listed = fewest if api is Api.CHAT else most  # tokens of one text are one entry there
    return f"{listed} of {top} likeliest tokens" if listed < top else ""


def _too_probable(answer: Answer) -> str:
    for n, token in enumerate(answer.choice.tokens):
        values = [value for _, value in token.top if value is not None]
        if token.logprob is not None and token.logprob > _SUM_TOLERANCE:
            return f"token {n}: log-probability {token.logprob}"
        total = math.fsum(math.exp(min(value, 1.0)) for value in values)
        if total > 1 + _SUM_TOLERANCE:
            return f"token {n}: sum {total:.4f}"
    return ""


def _not_chosen(answer: Answer) -> str:
    for n, token in enumerate(answer.choice.tokens):
        best = max((value for _, value in token.top if value is not None), default=None)
        if best is not None and token.logprob is not None and token.logprob < best - _TIE:
            return f"token {n} {token.text!r} has {token.logprob:.4f}, and another one {best:.4f}"
        if best is not None and token.text not in dict(token.top):
            return f"token {n} {token.text!r} is not among the likeliest that are listed"
    return ""


def _other_text(answer: Answer) -> str:
    choice = answer.choice
    text = "".join(token.text for token in choice.tokens)
    is_readable = _REPLACEMENT not in text + choice.text and "bytes:" not in text and "<0x" not in text
    if not is_readable or choice.reasoning or choice.finish_reason != "length" or text.strip() == choice.text.strip():
        return ""
    return f"{text[:40]!r} and {choice.text[:40]!r}"


def unicode_cuts(subject: Subject, api: Api) -> Steps:
    """Texts of every number of tokens are beginnings of the longest, and a stream never breaks a character."""
    prompt = f"{subject.nonce} {UNICODE}"
    number = min(_MAX_CUTS, subject.sizes.num_tokens)
    cuts = yield from alone(subject.ask(api, prompt, max_tokens=n) for n in range(1, number + 1))
    pairs = [(one, two) for one, two in pairwise(cuts) if one.is_ok and two.is_ok]
    longer = {id(one): two for one, two in pairs}
    subject.examine(
        "unicode.broken",
        "a character is never broken",
        [one for one, _ in pairs],
        lambda answer: _broken_cut(answer.choice.text, longer[id(answer)].choice.text),
    )
    if subject.can(api, Feature.STREAM):
        streamed = yield [subject.streamed(cuts[-1].ask)]
        whole = cuts[-1].choice.text if cuts[-1].is_ok else ""
        subject.examine(
            "unicode.broken",
            "a character is never broken in a stream",
            [one for one in streamed if whole],
            lambda answer: _broken_stream(answer, whole),
        )


def _broken_cut(text: str, longer: str) -> str:
    known = text.rstrip(_REPLACEMENT)
    is_longer = longer.startswith(known) or longer.rstrip(_REPLACEMENT) == known
    inner = _REPLACEMENT in known and known.count(_REPLACEMENT) > longer.count(_REPLACEMENT)
    if inner:
        return f"{text[-20:]!r}, and with one token more {longer[-20:]!r}"
    return "" if is_longer or not _only_characters_differ(known, longer) else f"{text[-20:]!r} and {longer[-20:]!r}"


def _only_characters_differ(text: str, longer: str) -> bool:
    """Whether they differ in a replacement character, which is the matter here; others are one of purity."""
    at = next((n for n, (a, b) in enumerate(zip(text, longer, strict=False)) if a != b), None)
    return at is not None and _REPLACEMENT in (text[at], longer[at])


def _broken_stream(answer: Answer, whole: str) -> str:
    text = answer.choice.text
    if answer.problems:
        return answer.problems[0]
    if text.count(_REPLACEMENT) > whole.count(_REPLACEMENT):
        return f"{text[-30:]!r}, and as a whole {whole[-30:]!r}"
    return ""
