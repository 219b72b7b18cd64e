"""Structured outputs and tools: answers are valid by their schema, calls are of tools that were given."""

import json
from typing import Any, Final

from jsonschema import Draft202012Validator

from holdfast.cluster.verify.exchange import Answer, Ask, Call
from holdfast.cluster.verify.finding import Kind
from holdfast.cluster.verify.material import OTHER_TOOL, SCHEMAS, TOOL
from holdfast.cluster.verify.subject import Api, Feature, Steps, Subject, alone

_FORMATS: Final = Draft202012Validator.FORMAT_CHECKER
_ROOM: Final = 96
"""Output tokens, more than any instance of the schemas needs."""


def schemas(subject: Subject, api: Api) -> Steps:
    """A corpus of schemas by keyword, at temperature 0 and drawn."""
    if api is not Api.CHAT:
        return
    cases = [
        (keyword, schema, params) for keyword, schema in SCHEMAS.items() for params in ({"temperature": 0}, _DRAWN)
    ]
    asks = [_with_schema(subject, keyword, schema, params) for keyword, schema, params in cases]
    (first,) = yield asks[:1]
    if not first.is_ok:
        about = f"structured output (json_schema) is not offered: {first.status} {first.message}"
        subject.found("structured.missing", Kind.NOTE, about, first)
        return
    answers = [first, *(yield from alone(asks[1:]))]
    meant = {id(answer): case for answer, case in zip(answers, cases, strict=True)}
    subject.examine(
        "structured.invalid",
        "a structured output is valid by its schema",
        answers,
        lambda answer: _invalid(answer, *meant[id(answer)][:2]),
    )
    refused = sorted({meant[id(one)][0] for one in answers if not one.is_ok and 400 <= one.status < 500})
    if refused:
        subject.found("structured.missing", Kind.NOTE, f"keywords that are refused: {', '.join(refused)}")


_DRAWN: Final = {"temperature": 1.0, "seed": 7}


def _with_schema(subject: Subject, keyword: str, schema: dict[str, Any], params: dict[str, Any]) -> Ask:
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    prompt = f"Answer {subject.nonce} with JSON ({keyword})."
    return subject.ask(Api.CHAT, prompt, response_format=shape, **{"max_tokens": _ROOM} | params)


def _invalid(answer: Answer, keyword: str, schema: dict[str, Any]) -> str:
    if answer.choice.finish_reason != "stop":
        return ""  # cut off: nothing can be said
    try:
        value = json.loads(answer.choice.text)
    except ValueError:
        return f"{keyword}: no JSON: {answer.choice.text[:60]!r}"
    error = next(Draft202012Validator(schema, format_checker=_FORMATS).iter_errors(value), None)
    return f"{keyword}: {error.message[:80]}" if error else ""


def tools(subject: Subject, api: Api) -> Steps:
    """Tool calls that are asked for: they are of a tool that was given, parse, and are the same in a stream."""
    if api is not Api.CHAT:
        return
    named = {"type": "function", "function": {"name": "open_door"}}
    asks = [_with_tools(subject, choice, n) for n, choice in enumerate(("required", named))]
    answers = yield from alone(asks)
    if not any(answer.is_ok for answer in answers):
        about = f"tool_choice is not offered: {answers[0].status} {answers[0].message}"
        subject.found("tools.missing", Kind.NOTE, about, answers[0])
        return
    subject.examine("tools.unparsable", "a call that is asked for comes, and fits its tool", answers, wrong_call)
    if not subject.can(api, Feature.STREAM):
        return
    known = [answer for answer in answers if answer.is_ok]
    streamed = yield from alone(subject.streamed(answer.ask) for answer in known)
    whole = {id(two): one for one, two in zip(known, streamed, strict=True)}
    subject.examine(
        "tools.streamed",
        "a streamed call equals the whole one",
        streamed,
        lambda answer: _other_calls(answer.choice.calls, whole[id(answer)].choice.calls),
    )


def _with_tools(subject: Subject, choice: Any, number: int) -> Ask:
    prompt = f"Task {subject.nonce}-{number}: switch on the lamp in the hall, and open the front door."
    return subject.ask(Api.CHAT, prompt, tools=[TOOL, OTHER_TOOL], tool_choice=choice, max_tokens=_ROOM)


def wrong_call(answer: Answer) -> str:
    """Says why the calls of an answer are wrong; empty: they are right, or were cut off."""
    if answer.choice.finish_reason == "length":
        return ""
    if not answer.choice.calls:
        return f"no call: {answer.choice.text[:60]!r}"
    given = {one["function"]["name"]: one["function"]["parameters"] for one in answer.ask.params["tools"]}
    for call in answer.choice.calls:
        if call.name not in given:
            return f"a tool that was not given: {call.name!r}"
        try:
            value = json.loads(call.arguments)
        except ValueError:
            return f"arguments that are not JSON: {call.arguments[:60]!r}"
        if error := next(Draft202012Validator(given[call.name]).iter_errors(value), None):
            return f"arguments of {call.name}: {error.message[:80]}"
    return ""


def _other_calls(found: list[Call], expected: list[Call]) -> str:
    return "" if found == expected else f"{found[:1]} and {expected[:1]}"
