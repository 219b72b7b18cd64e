"""Grammars of tool calls: outputs drawn at random under them parse as calls whose arguments match the schemas."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, Content, merged
from holdfast.router.tools.call_grammar import markers, single_tokens, tool_grammar
from holdfast.router.tools.chat_style import FORMATS, parser_for
from holdfast.router.tools.reasoning import splitter_for
from holdfast.router.tools.tools import Tool, ToolChoice
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.structured_outputs import StructuredOutputs
from tests.examples import examples

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_short": {"type": "boolean"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "is_short"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": ["x"]}},
}
ECHO = {"type": "object", "properties": {"text": {"type": "string", "minLength": 1, "maxLength": 4}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool(name="get_weather", parameters=WEATHER, is_strict=True),
    Tool(name="echo", parameters={**ECHO, "additionalProperties": False}, is_strict=True),
    Tool(name="now", parameters=NOTHING, is_strict=True),
)
MODEL = Path(__file__).parents[3] / "cluster/bundled_model/model"
EOS = "</s>"
REASONING = "qwen3"
NEW = ("glm45", "minimax_m2", "deepseek_v32", "kimi_k2")


@cache
def tokenizer(texts: tuple[str, ...]) -> tuple[Fast, LLTokenizer]:
    """Tokens of one byte, and those of the texts."""
    bytes_ = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Fast(models.BPE(vocab=bytes_, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([EOS, *texts[:1]])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts[1:]])
    return fast, LLTokenizer(fast.to_str(), eos_token=[fast.token_to_id(EOS)])


CLOSERS = [
    "<｜tool▁calls▁end｜>",
    '<|"|>',
    "<tool_call|>",
    "\n</parameter>",
    "</parameter>",
    "</tool_call>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "</｜DSML｜function_calls>",
    "</｜DSML｜tool_calls>",
    "</minimax:tool_call>",
    "<|tool_calls_section_end|>",
    "</think>",
    *'"}])>',
]


def drawn(grammar: str, name: str, are_single: bool, dice: random.Random, num_free: int = 60) -> str:
    """A random output: characters, many of them from a few, and after a while what closes a value or a call."""
    fast, llguidance = tokenizer(tokens(name) if are_single else ())
    compiled = LLMatcher.grammar_from_lark(grammar)
    assert not LLMatcher.validate_grammar_with_warnings(compiled, llguidance)[0]
    matcher = LLMatcher(llguidance, compiled, log_level=0)
    eos, token_ids = fast.token_to_id(EOS), list[int]()
    likely = set(fast.encode('"}])>aé1.,{[ \n').ids)
    while not matcher.is_stopped():
        allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
        assert allowed, matcher.get_error()
        assert len(token_ids) < 2000, fast.decode(token_ids[:400])
        is_late = len(token_ids) > num_free
        if eos in allowed and (is_late or dice.random() < 0.3):
            break
        if is_late:
            closers = [
                fast.encode(text).ids for text in CLOSERS if text in ECHOES.get(name, text) or text == "</think>"
            ]
            chosen = dice.choice(
                [ids for ids in closers if matcher.validate_tokens(ids) == len(ids)] or [[min(allowed)]]
            )
        else:
            usable = [i for i in allowed if i in likely and dice.random() < 0.7] or [i for i in allowed if i != eos]
            chosen = [dice.choice(usable or [eos])]
        assert matcher.consume_tokens(chosen)
        token_ids += chosen
    return fast.decode([i for i in token_ids if i != eos], skip_special_tokens=False)


def calls_of(name: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    """(calls, content). All calls are complete."""
    parser = parser_for(name, TOOLS)
    events = merged([*parser.push(text), *parser.finish()])
    assert all(event.is_complete for event in events if isinstance(event, CallEnd)), text
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [json.loads(event.json) for event in events if isinstance(event, CallArguments)]
    content = "".join(event.text for event in events if isinstance(event, Content))
    return list(zip(names, arguments, strict=True)), content


def check(calls: list[tuple[str, Any]]) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


def tokens(name: str) -> tuple[str, ...]:
    return markers(name, REASONING)


def ids(name: str, are_single: bool) -> dict[str, int]:
    """Of the markers that are single tokens."""
    fast, _ = tokenizer(tokens(name) if are_single else ())
    return single_tokens(tokens(name), lambda text: fast.encode(text, add_special_tokens=False).ids)


@pytest.mark.in_turn
@pytest.mark.parametrize("are_single", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_required_and_named_outputs_are_calls_that_match_the_schemas(name: str, are_single: bool):
    token_ids = ids(name, are_single)
    assert set(token_ids) == (set(tokens(name)) if are_single else set())
    for seed in range(examples(8)):
        dice = random.Random(seed)
        grammar = tool_grammar(name, TOOLS, ToolChoice("required"), token_ids=token_ids, is_parallel=bool(seed % 2))
        calls, content = calls_of(name, text := drawn(grammar, name, are_single, dice))
        assert (bool(calls), content) == (True, ""), text
        assert seed % 2 or len(calls) == 1
        check(calls)
        grammar = tool_grammar(name, TOOLS, ToolChoice("named", "echo"), token_ids=token_ids)
        calls, content = calls_of(name, drawn(grammar, name, are_single, dice))
        assert ([called for called, _ in calls], content) == (["echo"], "")
        check(calls)


@pytest.mark.in_turn
@pytest.mark.parametrize("are_single", [False, True])
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "mistral", "deepseek_v31", "gemma4", "lfm2", "pythonic", "llama3_json", *NEW]
)
def test_with_strict_tools_an_output_is_text_or_calls_that_match(name: str, are_single: bool):
    grammar = tool_grammar(name, TOOLS, ToolChoice("auto"), token_ids=ids(name, are_single))
    for seed in range(8):
        calls, _ = calls_of(name, drawn(grammar, name, are_single, random.Random(seed), num_free=seed * 4))
        check(calls)
    beginning = {"pythonic": "", "llama3_json": ""}.get(name, "Hm.")
    written = ECHOES["mistral, named"] if (name, are_single) == ("mistral", True) else ECHOES[name]
    assert accepts(grammar, beginning + written % "abcd", name, are_single)
    assert not accepts(grammar, beginning + written % "abcde", name, are_single)
    assert accepts(grammar, "Plain text.\n", name, are_single)


ECHOES = {
    "hermes": '<tool_call>\n{"name": "echo", "arguments": {"text": "%s"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=echo>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "echo", "arguments": {"text": "%s"}}]',
    "mistral, named": '[TOOL_CALLS]echo[ARGS]{"text": "%s"}',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>echo<｜tool▁sep｜>"
    '{"text": "%s"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:echo{text:<|"|>%s<|"|>}<tool_call|>',
    "lfm2": '<|tool_call_start|>[echo(text="%s")]<|tool_call_end|>',
    "pythonic": '[echo(text="%s")]',
    "glm45": "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="echo">\n<parameter name="text">%s</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="echo">\n<｜DSML｜parameter name="text" '
    'string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.echo:0<|tool_call_argument_begin|>"
    '{"text": "%s"}<|tool_call_end|><|tool_calls_section_end|>',
    "llama3_json": '{"name": "echo", "parameters": {"text": "%s"}}',
}


def accepts(grammar: str, text: str, name: str, are_single: bool) -> bool:
    fast, llguidance = tokenizer(tokens(name) if are_single else ())
    matcher = LLMatcher(llguidance, LLMatcher.grammar_from_lark(grammar), log_level=0)
    token_ids = fast.encode(text, add_special_tokens=False).ids
    return (
        matcher.validate_tokens(token_ids) == len(token_ids)
        and matcher.consume_tokens(token_ids)
        and matcher.is_accepting()
    )


def test_no_text_has_what_ends_it():
    grammar = tool_grammar("qwen3_coder", TOOLS, ToolChoice("named", "echo"))
    call = "<tool_call>\n<function=echo>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call % "a\nb", "qwen3_coder", False)
    free = tool_grammar("qwen3_coder", [Tool(name="echo", parameters={"required": ["text"]})], ToolChoice("required"))
    assert accepts(free, call % "any length", "qwen3_coder", False)
    assert not accepts(free, call % "a</parameter>b", "qwen3_coder", False)


@pytest.mark.parametrize("are_single", [False, True])
@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("auto")])
@pytest.mark.parametrize("starts_inside", [False, True])
def test_reasoning_may_come_first(are_single: bool, choice: ToolChoice, starts_inside: bool):
    grammar = tool_grammar(
        "hermes",
        TOOLS,
        choice,
        token_ids=ids("hermes", are_single),
        reasoning=REASONING,
        starts_in_reasoning=starts_inside,
    )
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    thoughts = ("" if starts_inside else "<think>") + "\n{}Hm.\n</think>\n\n"
    assert accepts(grammar, thoughts + call, "hermes", are_single)
    assert accepts(grammar, thoughts + "Text.", "hermes", are_single) == (choice.mode == "auto")
    if not starts_inside:
        assert accepts(grammar, call, "hermes", are_single)
    for seed in range(4):
        text = drawn(grammar, "hermes", are_single, random.Random(seed))
        splitter = splitter_for(REASONING, starts_inside=starts_inside)
        calls, _ = calls_of("hermes", splitter.push(text).content + splitter.finish().content)
        assert calls or choice.mode == "auto", text
        check(calls)


def test_a_grammar_compiles_for_a_model_as_it_comes_from_a_request():
    compiler = GrammarCompiler(Tokenizer.load(str(MODEL)))
    for name in FORMATS:
        grammar = tool_grammar(name, TOOLS, ToolChoice("required"), token_ids={"<tool_call>": 1, "[ARGS]": 2})
        assert compiler.compile(StructuredOutputs(grammar=grammar))


def test_no_grammar_where_any_output_will_do():
    lax = (Tool(name="f"),)
    assert tool_grammar("hermes", lax, ToolChoice("auto")) == ""
    assert tool_grammar("hermes", TOOLS, ToolChoice("none")) == ""


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        ("pythonic", {"anyOf": [{}]}, "tools[0].function.parameters.anyOf"),
        ("pythonic", {"properties": {"a-b": {}}}, "tools[0].function.parameters.properties"),
        ("qwen3_coder", {"minProperties": 1}, "tools[0].function.parameters.minProperties"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "tools[0].function.parameters.properties"),
        (
            "qwen3_coder",
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "tools[0].function.parameters.properties.a.pattern",
        ),
        (
            "qwen3_coder",
            {"properties": {"a": {"enum": ["</parameter>"]}}},
            "tools[0].function.parameters.properties.a.enum",
        ),
        ("gemma4", {"properties": {"a": {}}}, "tools[0].function.parameters.properties.a"),
        ("lfm2", {"required": ["a"], "additionalProperties": False}, "tools[0].function.parameters.required"),
    ],
)
def test_a_schema_that_a_format_cannot_write_is_refused_by_name(name: str, parameters: dict[str, Any], field: str):
    with pytest.raises(InvalidRequestError) as refused:
        tool_grammar(name, [Tool(name="f", parameters=parameters, field="tools[0].function")], ToolChoice("required"))
    assert refused.value.field == field


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="tool_call_parser"):
        tool_grammar("nobody", TOOLS, ToolChoice("required"))
