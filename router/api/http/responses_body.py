"""Body of `/v1/responses`: OpenAI's newer conversations and tools, as the same chat in the older words."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from holdfast.router.api.http.bodies import ONE_PLAIN_CHOICE, ChatBody, Notes, StreamOptions
from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.api.http.stored_objects import check_metadata
from holdfast.router.chat import PART_NOTES, call_arguments, checked_role, content_text
from holdfast.router.tools.tools import check_tool_names
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import Neutral, check_names

_OF_SCHEMA: Final = ("schema", "name", "description", "strict")

LOGPROBS: Final = "message.output_text.logprobs"
_ITEM_NOTES: Final = frozenset(("id", "status", "phase", "caller", "namespace", "async", "created_by"))
"""Fields of items that no answer depends on: vendors' notes about earlier answers, which clients send back."""

_ITEMS: Final[Mapping[object, Collection[str]]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "name", "output"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
"""Fields of items by their type, beside it and the notes."""

NOTHING: Final = "reasoning.encrypted_content"
"""Accepted value of `include` without effect: no content is kept from a client."""


class ResponsesBody(Reads, Notes):
    """`POST /v1/responses`."""

    neutral: ClassVar[Neutral] = {
        **Reads.neutral,
        **ONE_PLAIN_CHOICE,
        "prompt": (),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "previous_input_messages": ([],),
        "access_programs": ({"cyber": "standard"},),
        "background_options": ({"completion_window": "soonest"},),
        "context_management": ([],),
        "reasoning.summary": ("auto",),  # reasoning is sent as it is
        "reasoning.generate_summary": ("auto",),
        "reasoning.context": ("auto",),
        "reasoning.mode": ("standard",),
    }

    objects: ClassVar[Mapping[str, Collection[str]]] = {
        **Reads.objects,
        "image": ("context_compression",),
        "reasoning": ("effort",),
        "stream_options": (),
        "text": ("format", "verbosity"),
    }

    passed_on: ClassVar[Container[str]] = frozenset(ChatBody.model_fields)

    renamed: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_tokens",
        "input": "messages",
        "text.format": "response_format",
        **{f"text.format.{name}": f"response_format.json_schema.{name}" for name in _OF_SCHEMA},
        "reasoning.effort": "reasoning_effort",
        "text.verbosity": "verbosity",
    }

    fixed_names: ClassVar[Mapping[str, str]] = {"tools[].function": "tools[]", "tool_choice.function": "tool_choice"}

    lists_of_objects = ("input", "tools")
    model: str | None = None
    input: str | Listed[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    image: dict[str, Any] | None = None
    """Field for prompts with images, which are not supported."""
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Listed[str] | None = None
    store: bool | None = None
    """Whether the response can be read and continued later, where responses are stored; null is true."""
    background: bool | None = None
    """The response is computed whether its client stays or not, and is read later; it must be stored."""
    previous_response_id: str | None = None
    """Id of the stored response whose conversation continues."""
    conversation: str | dict[str, Any] | None = None
    """The id of a stored conversation that goes on, and gets this turn; alone, or as the field of an object."""
    top_logprobs: int | None = None
    """Best tokens reported for each token of the text, with `LOGPROBS` in `include`."""
    enable_response_messages: bool | None = None
    """The response has its prompt and output as the model has them: texts and token ids."""

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation, which the body gives as text or as an object."""
        given = self.conversation
        return given["id"] if isinstance(given, dict) else given

    @property
    def continues(self) -> bool:
        """Whether items that are stored come before its input."""
        return self.previous_response_id is not None or self.conversation is not None

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def _check_together(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "set", "must come with stream = true")
        for item in self.include or ():
            if item not in (LOGPROBS, NOTHING):
                raise InvalidRequestError("include", item, f"must be {LOGPROBS} or {NOTHING}")
        given = self.conversation
        if isinstance(given, dict) and (list(given) != ["id"] or not isinstance(given["id"], str)):
            raise InvalidRequestError("conversation", given, 'must be an id, or {"id": an id}')
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequestError("conversation", given, "must not come with previous_response_id")
        check_metadata(self.metadata)
        if self.background and self.store is False:
            raise InvalidRequestError("background", True, "must come with store = true")
        if self.top_logprobs and not self.tells_logprobs:
            raise InvalidRequestError("top_logprobs", self.top_logprobs, f"must come with include = [{LOGPROBS!r}]")


def chat_body(body: ResponsesBody, earlier: Sequence[dict[str, Any]] = ()) -> ChatBody:
    """The same request in the older words, after the items of `earlier` turns. Raises `InvalidRequestError`, naming
    the field.
    """
    own: dict[str, Any] = {
        "model": body.model,
        **body.given_renamed(),
        "messages": list(_messages(body, earlier)),
        "response_format": _format(body),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    if body.tells_logprobs:
        own |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        own["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None and (body.tools or body.tool_choice != "auto"):
        own["tool_choice"] = _choice(body.tool_choice)
    own["reasoning_effort"] = (body.reasoning or {}).get("effort")
    own["verbosity"] = (body.text or {}).get("verbosity")
    return ChatBody.made_of(body, {**(body.model_extra or {}), **own})


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"{field}.type", tool.get("type"), "must be function: this server has no other tools")
    parts = ("name", "parameters", "description", "strict")
    check_tool_names(tool, ("type", *parts), field)
    return {"type": "function", "function": {name: tool.get(name) for name in parts}}


def _choice(choice: object) -> object:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        check_names(choice, ("type", "name"), "tool_choice")
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping):
        raise InvalidRequestError("tool_choice.type", choice.get("type"), "must be function")
    return choice


def _messages(body: ResponsesBody, earlier: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    turn: dict[str, Any] = {}
    for index, item in enumerate((*earlier, *given), -len(earlier)):
        kind = item.get("type", "message")
        field = f"input[{index}]" if index >= 0 else f"{_place_of_earlier(body)}: item {index} before the input"
        if isinstance(kind, str) and kind in _ITEMS:
            check_names(item, ("type", *_ITEMS[kind]), field, _ITEM_NOTES)
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if "tool_calls" in turn and kind != "function_call":  # messages after calls begin another turn
                yield turn
                turn = {}
            _add_to_turn(turn, kind, item, field)
            continue
        if turn:
            yield turn
            turn = {}
        yield _told(kind, item, field)
    if turn:
        yield turn


def _place_of_earlier(body: ResponsesBody) -> str:
    return "previous_response_id" if body.conversation is None else "conversation"


def _add_to_turn(turn: dict[str, Any], kind: str, item: Mapping[str, Any], field: str) -> None:
    """Thoughts, text and calls of the model follow each other as items, and are one message for a template."""
    turn.setdefault("role", "assistant")
    turn.setdefault("content", "")
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str):
            raise InvalidRequestError(f"{field}.name", name, "must be text")
        function = {"name": name, "arguments": call_arguments(arguments, f"{field}.arguments")}
        call = {"id": _call_id(item, field), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(item, field)
    else:
        turn["content"] += content_text(item.get("content"), f"{field}.content")


def _thoughts(item: Mapping[str, Any], field: str) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise InvalidRequestError(f"{field}.content", parts, "must be a list of reasoning texts")
    for index, part in enumerate(parts):
        if isinstance(part, Mapping):
            check_names(part, ("type", "text"), f"{field}.content[{index}]", PART_NOTES)
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _told(kind: object, item: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A message of a role other than assistant."""
    if kind == "function_call_output":
        output = content_text(item.get("output"), f"{field}.output")
        return {"role": "tool", "tool_call_id": _call_id(item, field), "content": output}
    if kind != "message":
        raise InvalidRequestError(f"{field}.type", kind, "must be message, function_call, its output, or reasoning")
    content = item.get("content")
    if content is None:
        raise InvalidRequestError(f"{field}.content", content, "must be text")
    role = checked_role(item.get("role"), f"{field}.role")
    return {"role": role, "content": content_text(content, f"{field}.content")}


def _call_id(item: Mapping[str, Any], field: str) -> str | None:
    call_id = item.get("call_id")
    if not isinstance(call_id, str | None):
        raise InvalidRequestError(f"{field}.call_id", call_id, "must be text")
    return call_id


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    asked = (body.text or {}).get("format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if isinstance(asked, Mapping) and kind in ("text", "json_object", "json_schema"):
        check_names(asked, ("type", *(_OF_SCHEMA if kind == "json_schema" else ())), "text.format")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema" and isinstance(asked.get("schema"), Mapping):
        return {"type": kind, "json_schema": {name: asked.get(name) for name in _OF_SCHEMA}}
    raise InvalidRequestError("text.format", asked, "must be text, json_object, or json_schema with a schema")
