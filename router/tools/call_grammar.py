"""Grammar of tool calls: the form of an output whose calls match the JSON schemas of the tools.

A grammar is text in llguidance's Lark, for `StructuredOutputs.grammar`; whether a schema can be enforced is found out
when that is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from holdfast.router.schemas.places import SchemaError
from holdfast.router.tools.gemma_calls import QUOTE
from holdfast.router.tools.harmony import ANALYSIS, CHANNEL, CONSTRAIN, END, HARMONY, MARKS, MESSAGE, OPENING, START
from holdfast.router.tools.json_calls import (
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_SECTION,
    KIMI_SECTION_END,
)
from holdfast.router.tools.reasoning import REASONING_TAGS
from holdfast.router.tools.tools import Tool, ToolChoice
from holdfast.router.tools.typed_parameters import (
    LarkRules,
    gemma_arguments,
    python_arguments,
    xml_parameters,
)
from holdfast.router.tools.xml_calls import DSML, Markup
from holdfast.worker.errors import InvalidRequestError

_NO_TOKENS: Final[Mapping[str, int]] = MappingProxyType({})


_Call: TypeAlias = Callable[[LarkRules, Tool, str], str]
"""Writes one call, given the prefix of its rules' names."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of a format's calls: a marker, `before` them, each one, `between` them, `after` them."""

    call: _Call
    marker: str = ""
    before: str = ""
    between: str = ""
    """Text between calls, with the marker again if each call has one."""
    after: str = ""
    bare: str = ""
    """The character by which an output is seen to be calls, where they have no marker."""
    banned: str = ""
    """A text that parsers take for a call, and that is in no other text."""
    others: tuple[str, ...] = ()
    """Further texts that may be single tokens."""


def _json_call(before: str, key: str, after: str) -> _Call:
    def call(rules: LarkRules, tool: Tool, prefix: str) -> str:
        head = rules.text(f'{before}{{"name": "{tool.name}", "{key}": ')
        return f"{head} {rules.json(f'{prefix}_arguments', _schema(tool))} {rules.text(after)}"

    return call


def _named_call(before: str, between: str, after: str) -> _Call:
    def call(rules: LarkRules, tool: Tool, prefix: str) -> str:
        head = rules.text(f"{before}{tool.name}{between}")
        return f"{head} {rules.json(f'{prefix}_arguments', _schema(tool))} {rules.text(after)}"

    return call


def _numbered_call(rules: LarkRules, tool: Tool, prefix: str) -> str:
    head = f"{rules.text(f'{KIMI_CALL}functions.{tool.name}:')} /[0-9]{{1,3}}/ {rules.text(KIMI_ARGUMENTS)}"
    return f"{head} {rules.json(f'{prefix}_arguments', _schema(tool))} {rules.text(KIMI_CALL_END)}"


def _python_call(rules: LarkRules, tool: Tool, prefix: str) -> str:
    return f"{rules.text(f'{tool.name}(')} {python_arguments(rules, tool, prefix)} {rules.text(')')}"


def _gemma_call(rules: LarkRules, tool: Tool, prefix: str) -> str:
    end = rules.text(f"}}{_GEMMA_END}")
    return f"{rules.text(f'call:{tool.name}{{')} {gemma_arguments(rules, tool, prefix)} {end}"


def _xml_call(before: str, behind: str, end: str, markup: Markup) -> _Call:
    def call(rules: LarkRules, tool: Tool, prefix: str) -> str:
        parameters = xml_parameters(rules, tool, prefix, markup)
        return f"{rules.text(f'{before}{tool.name}{behind}')} {parameters} {rules.text(end)}"

    return call


def _schema(tool: Tool) -> Mapping[str, Any]:
    return {"type": "object", **tool.parameters}


_GEMMA, _GEMMA_END = "<|tool_call>", "<tool_call|>"
_HARMONY: Final = _Form(_named_call(OPENING, f" {CONSTRAIN}json{MESSAGE}", ""), others=MARKS)
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HERMES: Final = _Form(
    _json_call("\n", "arguments", f"}}\n{_TOOL_CALL_END}"),
    marker=_TOOL_CALL,
    between=f"\n{_TOOL_CALL}",
    others=(_TOOL_CALL_END,),
)
_XML: Final = _Form(
    _xml_call(
        "\n<function=",
        ">\n",
        f"</function>\n{_TOOL_CALL_END}",
        Markup("<parameter=", ">\n", "\n</parameter>"),
    ),
    marker=_TOOL_CALL,
    between=f"\n{_TOOL_CALL}",
    banned="<function=",
    others=(_TOOL_CALL_END,),
)
_GLM: Final = _Form(
    _xml_call("", "\n", _TOOL_CALL_END, Markup("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")),
    marker=_TOOL_CALL,
    between=f"\n{_TOOL_CALL}",
    others=(_TOOL_CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_INVOKE: Final = _Form(
    _xml_call('<invoke name="', '">\n', "</invoke>\n", Markup('<parameter name="', '">', "</parameter>")),
    marker="<minimax:tool_call>",
    before="\n",
    after="</minimax:tool_call>",
    banned='<invoke name="',
    others=("</minimax:tool_call>",),
)
_KIMI: Final = _Form(
    _numbered_call,
    marker=KIMI_SECTION,
    after=KIMI_SECTION_END,
    banned=KIMI_CALL,
    others=(KIMI_SECTION_END, KIMI_ARGUMENTS, KIMI_CALL_END),
)


def _dsml(block: str) -> _Form:
    invoke, parameter = (
        f'<{DSML}invoke name="',
        Markup(f'<{DSML}parameter name="', '" string="{kind}">', f"</{DSML}parameter>"),
    )
    return _Form(
        _xml_call(invoke, '">\n', f"</{DSML}invoke>\n", parameter),
        marker=f"<{DSML}{block}>",
        before="\n",
        after=f"</{DSML}{block}>",
        banned=invoke,
        others=(DSML,),
    )


_LLAMA: Final = _Form(_json_call("", "parameters", "}"), between="; ", bare="{", banned="<|python_tag|>")
_MISTRAL: Final = _Form(
    _json_call("", "arguments", "}"), marker="[TOOL_CALLS]", before="[", between=", ", after="]", others=("[ARGS]",)
)
_MISTRAL_NAMED: Final = _Form(_named_call("", "[ARGS]", ""), marker="[TOOL_CALLS]", between="[TOOL_CALLS]")


def _deepseek(call: _Call, between: str) -> _Form:
    others = (_CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
    return _Form(call, _CALLS_BEGIN, between=between, after=_CALLS_END, banned=_CALL_BEGIN, others=others)


def _python_list(opening: str, closing: str) -> _Form:
    return _Form(_python_call, opening, "[", ", ", f"]{closing}", others=(closing,))


_FORMS: Final[Mapping[str, _Form]] = MappingProxyType(
    {
        "hermes": _HERMES,
        "qwen3_coder": _XML,
        "qwen3_xml": _XML,
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "pythonic": _Form(_python_call, before="[", between=", ", after="]", bare="["),
        "llama4_pythonic": _python_list("<|python_start|>", "<|python_end|>"),
        "lfm2": _python_list("<|tool_call_start|>", "<|tool_call_end|>"),
        "gemma4": _Form(_gemma_call, marker=_GEMMA, between=_GEMMA, others=(_GEMMA_END, QUOTE)),
        "mistral": _MISTRAL,
        "deepseek_v3": _deepseek(
            _named_call(f"{_CALL_BEGIN}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"), "\n"
        ),
        "openai": _HARMONY,
        "deepseek_v32": _dsml("function_calls"),
        "deepseek_v4": _dsml("tool_calls"),
        "glm45": _GLM,
        "glm47": _GLM,
        "minimax_m2": _INVOKE,
        "kimi_k2": _KIMI,
        "deepseek_v31": _deepseek(_named_call(_CALL_BEGIN, _SEPARATOR, _CALL_END), ""),
    }
)


def tool_grammar(
    format_name: str,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    token_ids: Mapping[str, int] = _NO_TOKENS,
    reasoning: str | None = None,
    starts_in_reasoning: bool = False,
) -> str:
    """The grammar of an output that calls tools as `choice` wants; empty where any output will do.

    `required` and `named` constrain all calls; `auto` only those of strict tools, and the output may be any other text.
    Without `is_parallel` there is one call, and so with `named`. `token_ids` are the markers that are single tokens
    (`single_tokens`). With `reasoning`, a name of `REASONING_TAGS`, the output may begin with reasoning.

    Raises `InvalidRequestError`, naming the field, for a schema that cannot be enforced, or that a format without types
    cannot write.
    """
    if choice.mode == "none" or (choice.mode == "auto" and not any(tool.is_strict for tool in tools)):
        return ""
    form, rules = _form(format_name, token_ids), LarkRules(token_ids)
    if form is _HARMONY:
        return _harmony_grammar(rules, tools, choice, has_thoughts=reasoning is not None)
    thoughts = _thoughts(rules, reasoning, starts_in_reasoning)
    if choice.mode == "auto":
        calls = _calls(rules, form, [_as_wanted(tool) for tool in tools], is_parallel)
        answer = _text_or_calls(rules, form, calls)
    else:
        chosen = [tool for tool in tools if choice.mode == "required" or tool.name == choice.name]
        calls = _calls(rules, form, chosen, is_parallel and choice.mode == "required")
        answer = f"{rules.text(form.marker)} {calls}"
    rules.add("start", f"{thoughts} {rules.add('answer', answer)}")
    return rules.written()


def _harmony_grammar(rules: LarkRules, tools: Sequence[Tool], choice: ToolChoice, *, has_thoughts: bool) -> str:
    """Thoughts, a message to the user, and one call, at which gpt-oss stops; with `auto` an answer in its place."""
    again = rules.text(f"{START}assistant")
    thoughts = f"{rules.text(f'{CHANNEL}{ANALYSIS}{MESSAGE}')} {rules.free_text('thoughts', END)} {again}"
    preamble = f"{rules.text(f'{CHANNEL}commentary{MESSAGE}')} {rules.free_text('preamble', END)} {again}"
    chosen = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    answer = _calls(rules, _HARMONY, [_as_wanted(tool) for tool in chosen] if choice.mode == "auto" else chosen, False)
    if choice.mode == "auto":
        answer += f" | {rules.text(f'{CHANNEL}final{MESSAGE}')} {rules.any_text('ANSWER')}"
    before = f"({thoughts})* ({preamble})?" if has_thoughts else ""
    rules.add("start", f"{before} {rules.add('answer', answer)}")
    return rules.written()


def markers(format_name: str | None, reasoning: str | None = None) -> tuple[str, ...]:
    """The texts that parsers and splitters look for. Each may be a single token of a tokenizer, even a special one."""
    form = _FORMS.get(format_name or "")
    calls = (form.marker, form.banned, *form.others) if form else ()
    tags = (ANALYSIS,) if reasoning == HARMONY else REASONING_TAGS[reasoning] if reasoning else ()
    return tuple(text for text in (*calls, *tags) if text)


def single_tokens(texts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> dict[str, int]:
    """Texts that a tokenizer writes as one token, with its id. `encode` adds no special tokens."""
    encoded = {text: encode(text) for text in texts}
    return {text: token_ids[0] for text, token_ids in encoded.items() if len(token_ids) == 1}


def _form(format_name: str, token_ids: Mapping[str, int]) -> _Form:
    """Mistral's newer tokenizers, whose models write calls without a list, have a token for `[ARGS]`."""
    if format_name not in _FORMS:
        raise InvalidRequestError("tool_call_parser", format_name, f"must be one of {', '.join(_FORMS)}")
    return _MISTRAL_NAMED if format_name == "mistral" and "[ARGS]" in token_ids else _FORMS[format_name]


def _calls(rules: LarkRules, form: _Form, tools: Sequence[Tool], is_parallel: bool) -> str:
    """A rule for all calls, without the first marker. Returns its name."""
    names = [rules.add(f"call_{index}", _call(rules, form, tool, f"call_{index}")) for index, tool in enumerate(tools)]
    call = rules.add("call", " | ".join(names))
    more = f"({rules.text(form.between)} {call})*" if is_parallel else ""
    return rules.add("calls", f"{rules.text(form.before)} {call} {more} {rules.text(form.after)}")


def _call(rules: LarkRules, form: _Form, tool: Tool, prefix: str) -> str:
    try:
        return form.call(rules, tool, prefix)
    except SchemaError as error:
        raise InvalidRequestError(f"{tool.field}.parameters", tool.name, error.reason) from None


def _text_or_calls(rules: LarkRules, form: _Form, calls: str) -> str:
    """Text that may go over into calls, after which the output ends. Bare calls stand before any other text."""
    if form.marker:
        return f"{rules.free_text('text', form.marker, form.banned)} {calls} | {rules.any_text('OTHER', form.banned)}"
    return f"{calls} | {rules.any_text('OTHER', form.banned, not_first=form.bare)}"


def _thoughts(rules: LarkRules, reasoning: str | None, starts_inside: bool) -> str:
    """The expression of reasoning with its end. An output need not have any, unless the prompt has begun it."""
    if reasoning is None:
        return ""
    tags = REASONING_TAGS[reasoning]
    inside = f"{rules.free_text('thoughts', tags.closing)} /\\n{{0,2}}/"
    return inside if starts_inside else f"({rules.text(tags.opening)} {inside})?"


def _as_wanted(tool: Tool) -> Tool:
    """A tool that is not strict takes any arguments."""
    return tool if tool.is_strict else Tool(name=tool.name, field=tool.field)
