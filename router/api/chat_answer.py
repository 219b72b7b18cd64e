"""Chats with tools and reasoning, for every API: the prompt and grammar, the output parser, and the public answer of
APIs that use the types of `holdfast.v1`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

from holdfast.router.chat import Chat
from holdfast.router.generation import ChatOutput, Generation, OutputDelta, ToolCall
from holdfast.router.request import GenerationRequest, naming
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEvent, Content
from holdfast.router.tools.chat_style import ChatReader, ChatStyle, Reasoning
from holdfast.router.tools.tools import Tool, ToolChoice, checked_tool_choice, checked_tools
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

SHAPE: Final = "sampling_params.structured_outputs"
"""Field of an output's structure in a generation request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A request that is ready to open, and how its answer is read."""

    request: GenerationRequest
    style: ChatStyle | None = None
    """None: the request asked for no text."""
    tools: tuple[Tool, ...] = ()
    """Tools that the output may call."""
    splits: bool = False
    begins_inside: bool = False
    keeps_special: bool = False
    is_parallel: bool = True

    @classmethod
    async def of(cls, request: GenerationRequest, processor: RequestProcessor, *, shape_field: str = SHAPE) -> Self:
        """`shape_field` is where the shape of its output stands. Raises `HoldfastError`, in the client's words: for
        tools that are wrong, or that the model's template cannot call.
        """
        with naming(request.names):
            return await cls._of(request, processor, shape_field)

    @classmethod
    async def _of(cls, request: GenerationRequest, processor: RequestProcessor, shape_field: str) -> Self:
        chat = request.chat
        if chat is None or not (chat.tools or chat.split_reasoning or chat.tool_choice is not None):
            return cls(request=request)
        style = processor.chat_style(request.model, has_tools=bool(chat.tools), template=chat.template)
        params = request.sampling_params
        tools, choice = await processor.apart(_checked, chat, style)
        if params.echo:
            raise InvalidRequestError(
                "sampling_params.echo", True, "must not be set where the answer of a chat is read"
            )
        chat = _with_tools(chat, () if style.is_generic and choice.mode == "none" else tools)
        callable_tools = tools if choice.mode != "none" else ()
        splits = style.reasoning is not None and params.structure is None
        prompt = await processor.render(request.model, chat) if splits or callable_tools else ""
        if callable_tools:
            write = partial(style.grammar, is_parallel=chat.parallel_tool_calls)
            grammar = await processor.apart(write, callable_tools, choice, prompt)
            params = await _with_grammar(params, grammar, request.model, processor, callable_tools, choice, shape_field)
        keeps_special = style.unwanted is not None and bool(callable_tools or splits) and params.skip_special_tokens
        if keeps_special:
            params = params.with_changes(skip_special_tokens=False)
        return cls(
            request=replace(request, chat=chat, sampling_params=params),
            style=style,
            tools=callable_tools,
            splits=splits,
            begins_inside=splits and style.begins_inside(prompt),
            keeps_special=keeps_special,
            is_parallel=chat.parallel_tool_calls,
        )

    def new_reader(self) -> ChatReader | None:
        """A reader of one completion; None if its text is plain content."""
        if self.style is None or not (self.tools or self.splits):
            return None
        return ChatReader(
            self.style,
            self.tools,
            splits=self.splits,
            begins_inside=self.begins_inside,
            is_filtered=self.keeps_special,
            is_parallel=self.is_parallel,
        )

    def read(self, generation: Generation) -> Generation:
        """A whole answer, with what its texts say."""
        if self.style is None:
            return generation
        completions = tuple(
            one._replace(chat=self._whole(generation.request_id, one.sequence_index, one.text))
            for one in generation.completions
        )
        return replace(generation, completions=completions)

    def _whole(self, request_id: str, index: int, text: str) -> ChatOutput:
        reader = self.new_reader()
        if reader is None:
            return ChatOutput(content=text)
        return _joined(_delta(call_prefix(request_id, index), [*reader.push(text), *reader.finish()]))


class ChatDeltas:
    """Reads the completions of one stream, as their text comes."""

    def __init__(self, plan: ChatPlan, received: Sequence[OutputDelta] = ()) -> None:
        """`received`: the output that the client of a resumed stream has."""
        self._plan = plan
        self._readers: dict[int, ChatReader] = {}
        for delta in received:
            self.of(delta)

    def of(self, delta: OutputDelta) -> ChatOutput | None:
        """Chat output of new text; None if only text was asked for."""
        if self._plan.style is None:
            return None
        index = delta.sequence_index
        reader = self._readers.get(index) or self._plan.new_reader()
        if reader is None:
            return ChatOutput(content=delta.text)
        self._readers[index] = reader
        events = reader.push(delta.text)
        if delta.finish_reason is not None:
            events += reader.finish()
        return _delta(call_prefix(delta.request_id, index), events)


def _checked(chat: Chat, style: ChatStyle) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Raises `InvalidRequestError`, naming the field."""
    tools = checked_tools(chat.tools, "chat.tools")
    choice = checked_tool_choice(chat.tool_choice, tools, "chat.tool_choice")
    if tools and choice.mode != "none" and style.call_format is None:
        limit = "cannot be called: the model's chat template writes no known calls"
        raise InvalidRequestError("chat.tools", len(tools), limit)
    return tools, choice


def _with_tools(chat: Chat, tools: Sequence[Tool]) -> Chat:
    """The chat with its tools as the template reads them."""
    if not tools:
        return replace(chat, tools=())
    template_kwargs = {**chat.template_kwargs, "tools": [tool.for_template() for tool in tools]}
    return replace(chat, template_kwargs=template_kwargs, tools=())


async def _with_grammar(
    params: SamplingParams,
    grammar: str,
    model: str,
    processor: RequestProcessor,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    shape_field: str,
) -> SamplingParams:
    """Parameters with the grammar of the tools, if a choice needs one. Raises `InvalidRequestError`, naming what cannot
    be enforced.
    """
    if not grammar:
        return params
    if params.structure is not None:
        raise InvalidRequestError(
            shape_field, params.structure.kind, "must not be set with tools whose calls are constrained"
        )
    structure = StructuredOutputs(grammar=grammar)
    await _check_tools(processor, model, structure, tools, choice)
    return params.with_changes(structured_outputs=structure)


async def _check_tools(
    processor: RequestProcessor, model: str, structure: StructuredOutputs, tools: tuple[Tool, ...], choice: ToolChoice
) -> None:
    """Raises `InvalidRequestError` for calls that cannot be enforced, naming the tool by which they cannot."""
    try:
        await processor.check_structure(model, structure)
    except InvalidRequestError as error:
        for tool in (tool for tool in tools if _is_enforced(tool, choice)):
            schema = StructuredOutputs(json={"type": "object", **tool.parameters})
            try:
                await processor.check_structure(model, schema)
            except InvalidRequestError as wrong:
                raise InvalidRequestError(f"{tool.field}.parameters", tool.name, wrong.limit) from None
        raise InvalidRequestError("chat.tools", [tool.name for tool in tools], error.limit) from None


def _is_enforced(tool: Tool, choice: ToolChoice) -> bool:
    if choice.mode == "auto":
        return tool.is_strict
    return choice.mode == "required" or tool.name == choice.name


def call_prefix(request_id: str, index: int) -> str:
    """Prefix of the ids of a completion's calls: the same on every router."""
    return f"call_{request_id[:24]}{index}"


def _delta(prefix: str, events: Iterable[Reasoning | CallEvent]) -> ChatOutput:
    reasoning, content, calls = "", "", list[ToolCall]()
    for event in events:
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegin):
            calls.append(ToolCall(index=event.index, id=f"{prefix}_{event.index}", name=event.name))
        elif isinstance(event, CallArguments):
            calls.append(ToolCall(index=event.index, arguments=event.json))
    return ChatOutput(reasoning=reasoning, content=content, tool_calls=tuple(calls))


def _joined(delta: ChatOutput) -> ChatOutput:
    calls: list[ToolCall] = []
    for piece in delta.tool_calls:
        if piece.name:
            calls.append(piece)
        else:
            begun = calls[piece.index]
            calls[piece.index] = replace(begun, arguments=begun.arguments + piece.arguments)
    return replace(delta, tool_calls=tuple(calls))
