"""Plan of a chat request: its tools, the grammar that they ask for, and how its output will be read.

What may not live here: formats (`router/tools/`), bodies and chunks.
"""

from dataclasses import dataclass

from holdfast.router.doors.http.bodies import ChatBody
from holdfast.router.doors.http.chat_completions import chat_of, chat_request
from holdfast.router.doors.http.sampling import structure_of
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.tools.chat_style import ChatReader, ChatStyle
from holdfast.router.tools.tools import Tool, ToolChoice, checked_tool_choice, checked_tools
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What is known of a chat before it is opened."""

    request: GenerationRequest
    style: ChatStyle
    tools: tuple[Tool, ...]
    """Those that the output may call."""
    splits: bool
    begins_inside: bool
    keeps_special: bool

    def new_reader(self) -> ChatReader | None:
        """What reads one choice; None where its text is content as it stands."""
        if not (self.tools or self.splits):
            return None
        return ChatReader(
            self.style,
            self.tools,
            splits=self.splits,
            begins_inside=self.begins_inside,
            is_filtered=self.keeps_special,
        )


async def plan_chat(body: ChatBody, requests: RequestProcessor, tenant: str) -> ChatPlan:
    """Raises `HoldfastError`: for tools that are wrong, or that the model's template cannot call."""
    tools = checked_tools(body.tools)
    choice = checked_tool_choice(body.tool_choice, tools)
    style = requests.chat_style(body.model or "")
    is_shaped = structure_of(body) is not None
    if tools and choice.mode != "none" and style.call_format is None:
        raise InvalidRequestError(
            "tools", len(tools), "cannot be called: the model's chat template writes no known calls"
        )
    callable_tools = tools if choice.mode != "none" else ()
    chat = chat_of(body, tools)
    splits = style.reasoning is not None and not is_shaped
    prompt = await requests.render(body.model or "", chat) if splits or callable_tools else ""
    structure = _structure(style, callable_tools, choice, prompt, is_parallel=body.parallel_tool_calls is not False)
    if structure is not None and is_shaped:
        raise InvalidRequestError("response_format", "set", "must not be set with tools that ask for a shape")
    if structure is not None:
        await _check_tools(requests, body.model or "", structure, callable_tools, choice)
    keeps_special = (
        style.unwanted is not None and bool(callable_tools or splits) and body.given("skip_special_tokens") is not False
    )
    return ChatPlan(
        request=chat_request(body, chat, structure, keeps_special=keeps_special, tenant=tenant),
        style=style,
        tools=callable_tools,
        splits=splits,
        begins_inside=splits and style.begins_inside(prompt),
        keeps_special=keeps_special,
    )


async def _check_tools(
    requests: RequestProcessor, model: str, structure: StructuredOutputs, tools: tuple[Tool, ...], choice: ToolChoice
) -> None:
    """Raises `InvalidRequestError` for calls that cannot be enforced, naming the tool by which they cannot."""
    try:
        await requests.check_structure(model, structure)
    except InvalidRequestError as error:
        for tool in (tool for tool in tools if _is_enforced(tool, choice)):
            schema = StructuredOutputs(json={"type": "object", **tool.parameters})
            try:
                await requests.check_structure(model, schema)
            except InvalidRequestError as wrong:
                raise InvalidRequestError(f"{tool.field}.parameters", tool.name, wrong.limit) from None
        raise InvalidRequestError("tools", [tool.name for tool in tools], error.limit) from None


def _is_enforced(tool: Tool, choice: ToolChoice) -> bool:
    if choice.mode == "auto":
        return tool.is_strict
    return choice.mode == "required" or tool.name == choice.name


def _structure(
    style: ChatStyle, tools: tuple[Tool, ...], choice: ToolChoice, prompt: str, *, is_parallel: bool
) -> StructuredOutputs | None:
    grammar = style.grammar(tools, choice, prompt, is_parallel=is_parallel) if tools else ""
    return StructuredOutputs(grammar=grammar) if grammar else None
