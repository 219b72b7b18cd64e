"""Chat messages rewritten for one chat template: content that the template would refuse or silently drop is moved to
where it takes it.

A pure function of the messages and the template's traits.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from holdfast.router.chat import arguments_object
from holdfast.router.text.template_traits import TemplateTraits, calls_text, result_text, tools_text
from holdfast.router.wire.json_bounds import check_inner

Messages: TypeAlias = list[dict[str, Any]]

_BETWEEN: Final = "\n\n"
"""Between the texts of messages that become one."""

_RESULTS: Final = ("tool", "function")
_SHORT: Final = 9
"""Letters and digits of a call's id, where templates require this length."""


def adapted(messages: Messages, traits: TemplateTraits, tools: Sequence[Mapping[str, Any]] = ()) -> Messages:
    """The messages, in the form of `plain_messages`, as the template takes them. `tools` that it does not show are
    written into the system message.
    """
    messages = [_with_known_role(message, traits) for message in messages]
    messages = list(_with_calls(messages, traits))
    if tools and not traits.shows_tools:
        messages = _told_tools(messages, tools_text(tools, says_how=not traits.shows_calls))
    messages = _with_systems(messages, traits)
    return messages if traits.takes_equal_roles else _alternating(messages)


def _with_known_role(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    if message["role"] == "developer" and not traits.takes_developer:
        return {**message, "role": "system"}
    if message["role"] == "function" and not traits.takes_function:
        return {**message, "role": "tool"}
    return message


# --- calls and results ---


def _with_calls(messages: Messages, traits: TemplateTraits) -> Iterator[dict[str, Any]]:
    if traits.names_by_id:
        messages = list(_with_named_ids(list(_with_ids(messages))))
    elif not traits.takes_long_ids:
        messages = list(_with_ids(messages))
    for message in messages if traits.shows_several_calls else _one_call_each(messages):
        if message["role"] in _RESULTS:
            yield _result(message, traits)
        elif "tool_calls" in message:
            yield from _turn_with_calls(message, traits)
        else:
            yield message


def _result(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    if not traits.shows_results:
        return {"role": "user", "content": result_text(message["content"])}
    if not traits.takes_long_ids:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _turn_with_calls(message: dict[str, Any], traits: TemplateTraits) -> Iterator[dict[str, Any]]:
    if not traits.shows_calls:
        texts = (message["content"], calls_text(message["tool_calls"]))
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**rest, "content": "\n".join(filter(None, texts))}
        return
    calls = [_taken_call(call, traits) for call in message["tool_calls"]]
    content = message["content"]
    if content and not traits.shows_calls_beside_text:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        content = ""
    yield {**message, "content": content or (None if traits.null_beside_calls else ""), "tool_calls": calls}


def _taken_call(call: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = call["function"]
    call = {**call, "function": {**function, "arguments": _taken_arguments(function["arguments"], traits)}}
    if not traits.takes_long_ids and isinstance(call.get("id"), str):
        call = {**call, "id": _short_id(call["id"])}
    return call


def _taken_arguments(arguments: Mapping[str, Any] | str, traits: TemplateTraits) -> Mapping[str, Any] | str:
    """Arguments in the form that the template takes. Text that is no JSON object, such as arguments that were cut off,
    is shown unchanged.
    """
    if traits.takes_json_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        check_inner("chat.messages.tool_calls.function.arguments", arguments)
    read = arguments_object(arguments)
    if read is not None:
        return read
    return arguments if traits.shows_text_arguments else {"arguments": arguments}


def _with_ids(messages: Messages) -> Iterator[dict[str, Any]]:
    """Calls and results that have no id get one: a result that of the first call without a result."""
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        if message["role"] in _RESULTS:
            own = message.get("tool_call_id") or next(iter(unanswered), f"{number}")
            unanswered = [call_id for call_id in unanswered if call_id != own]
            yield {**message, "tool_call_id": own}
        elif "tool_calls" in message:
            calls = message["tool_calls"]
            named = [{**call, "id": call.get("id") or f"{number}_{index}"} for index, call in enumerate(calls)]
            unanswered += [call["id"] for call in named]
            yield {**message, "tool_calls": named}
        else:
            yield message


def _with_named_ids(messages: Messages) -> Iterator[dict[str, Any]]:
    """Ids of calls become `functions.NAME:NUMBER`, counted over the conversation, and those of results likewise."""
    named: dict[str, str] = {}
    number = 0
    for message in messages:
        if message["role"] in _RESULTS:
            yield {**message, "tool_call_id": named.get(message["tool_call_id"], message["tool_call_id"])}
        elif "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                named[call["id"]] = f"functions.{call['function']['name']}:{number}"
                calls.append({**call, "id": named[call["id"]]})
                number += 1
            yield {**message, "tool_calls": calls}
        else:
            yield message


def _short_id(call_id: str) -> str:
    """The same for equal ids; an id that is short enough stays."""
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT]


def _one_call_each(messages: Messages) -> Iterator[dict[str, Any]]:
    """A turn with several calls becomes several turns, each with the results of its call."""
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            yield message
            continue
        end = position
        while end < len(messages) and messages[end]["role"] in _RESULTS:
            end += 1
        yield from _in_pairs(message, calls, messages[position:end])
        position = end


def _in_pairs(message: dict[str, Any], calls: Sequence[dict[str, Any]], results: Messages) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(calls):
        yield {**message, "content": "" if number else message["content"], "tool_calls": [call]}
        is_last = number == len(calls) - 1
        own = results if is_last else _results_of(call, results)
        yield from own
        results = [result for result in results if not any(result is one for one in own)]


def _results_of(call: Mapping[str, Any], results: Messages) -> Messages:
    """Results by the call's id; for calls without one, in their order."""
    if "id" not in call:
        return results[:1]
    return [result for result in results if result.get("tool_call_id") == call["id"]]


# --- system messages ---


def _told_tools(messages: Messages, text: str) -> Messages:
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": _joined((messages[0]["content"], text))}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_systems(messages: Messages, traits: TemplateTraits) -> Messages:
    """System messages as the template takes them: merged into one, or made the user's words if it takes none."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    if traits.system == "any" or not systems or (traits.system == "first" and messages[0] is systems[-1]):
        return messages
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    text = _joined(message["content"] for message in systems)
    if traits.system == "first":
        return [{**systems[0], "content": text}, *others]
    if others and others[0]["role"] == "user":
        return [{**others[0], "content": _joined((text, others[0]["content"]))}, *others[1:]]
    return [{"role": "user", "content": text}, *others]


# --- turns ---


def _alternating(messages: Messages) -> Messages:
    """Turns of the user, and of the model without calls, that follow each other become one."""
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and _may_join(last, message):
            joined[-1] = {**last, **message, "content": _joined((last["content"], message["content"]))}
        else:
            joined.append(message)
    return joined


def _may_join(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    is_turn = message["role"] in ("user", "assistant") and not ("tool_calls" in last or "tool_calls" in message)
    return is_turn and last["role"] == message["role"]


def _joined(texts: Iterable[str]) -> str:
    return _BETWEEN.join(filter(None, texts))
