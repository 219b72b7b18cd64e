"""Harmony, as gpt-oss writes it: what a template renders is read back, however the output is cut."""

import json

import pytest

from holdfast.router.text.chat import render_chat, template_traits
from holdfast.router.tools.call_events import CallArguments, CallBegin, CallEnd, Content
from holdfast.router.tools.call_grammar import tool_grammar
from holdfast.router.tools.chat_style import ChatReader, ChatStyle, Reasoning, detect_format
from holdfast.router.tools.harmony import ANALYSIS, HARMONY, MARKS, HarmonySplitter
from holdfast.router.tools.tools import Tool, ToolChoice, checked_tools
from tests.router.text.sample_templates import HARMONY as TEMPLATE
from tests.router.tools.test_call_grammar import accepts

TOOLS = checked_tools([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}])
IDS = {text: number for number, text in enumerate((*MARKS, ANALYSIS), 100)}
STYLE = ChatStyle(call_format="openai", reasoning=HARMONY, unwanted=("<|endoftext|>",), token_ids=IDS)
ARGUMENTS = {"city": "Köln \u2603", "days": 3, "units": {"wind": "m/s", "list": [1, 2.5, None, True]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
THOUGHTS = "<|channel|>analysis<|message|>They ask\nfor <weather>.<|end|>"
CALL = f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Sunny & 3 °C."

Told = tuple[str, str, list[tuple[str, str, bool]]]


def read(pieces: list[str], *, tools=TOOLS, is_parallel: bool = True) -> Told:
    """Reasoning, content and calls."""
    reader = ChatReader(STYLE, tools, splits=True, begins_inside=False, is_filtered=True, is_parallel=is_parallel)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls: list[list] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, "", False])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.json
        elif isinstance(event, CallEnd):
            calls[event.index][2] = event.is_complete
    return thoughts, content, [tuple(call) for call in calls]


WEATHER = ("get_weather", JSON, True)
CASES: dict[str, tuple[str, Told]] = {
    "an answer": (f"{THOUGHTS}{ANSWER}", ("They ask\nfor <weather>.", "Sunny & 3 °C.", [])),
    "an answer at once": ("<|channel|>final<|message|>Hi", ("", "Hi", [])),
    "a call": (f"{THOUGHTS}{CALL}<|call|>", ("They ask\nfor <weather>.", "", [WEATHER])),
    "a call whose end is a stop": (f"{THOUGHTS}{CALL}", ("They ask\nfor <weather>.", "", [WEATHER])),
    "a call at once, its recipient in the role": (
        f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>",
        ("", "", [WEATHER]),
    ),
    "a call in thoughts' channel": (
        f"<|channel|>analysis to=functions.get_weather code<|message|>{JSON}<|call|>",
        ("", "", [WEATHER]),
    ),
    "a preamble": (
        f"{THOUGHTS}<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>{CALL}",
        ("They ask\nfor <weather>.", "I look it up.", [WEATHER]),
    ),
    "two calls": (f"{THOUGHTS}{CALL}<|call|>{CALL}<|call|>", ("They ask\nfor <weather>.", "", [WEATHER, WEATHER])),
    "thoughts twice": (
        f"{THOUGHTS}<|start|>assistant<|channel|>analysis<|message|>Again.<|end|>{ANSWER}",
        ("They ask\nfor <weather>.\n\nAgain.", "Sunny & 3 °C.", []),
    ),
    "thoughts without their end": (
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>So.",
        ("Hm", "So.", []),
    ),
    "a browser's call is a thought": (
        f'<|channel|>analysis to=browser.search code<|message|>{{"query": "x"}}<|call|>{ANSWER}',
        ('{"query": "x"}', "Sunny & 3 °C.", []),
    ),
    "cut off in thoughts": ("<|channel|>analysis<|message|>They", ("They", "", [])),
    "cut off in a head": (f"{THOUGHTS}<|start|>assistant<|channel|>fin", ("They ask\nfor <weather>.", "", [])),
    "cut off in a call": (
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "K',
        ("", "", [("get_weather", '{"city": "K', False)]),
    ),
    "a malformed call": (
        "<|channel|>commentary to=functions.get_weather<|message|>{city: 1}<|call|>",
        ("", "city: 1}", [("get_weather", "{", False)]),
    ),
    "a call without arguments' object": (
        "<|channel|>commentary to=functions.get_weather<|message|>no idea<|call|>",
        ("", "<|channel|>commentary to=functions.get_weather<|message|>no idea<|call|>", []),
    ),
    "no channels": ("Just text, with a < in it.", ("", "Just text, with a < in it.", [])),
    "nothing": ("", ("", "", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_read_however_it_is_cut(name):
    text, told = CASES[name]
    assert read([text]) == told
    assert read(list(text)) == told
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == told, cut


def test_without_tools_the_arguments_of_a_call_are_content():
    assert read([f"{THOUGHTS}{CALL}<|call|>"], tools=()) == ("They ask\nfor <weather>.", JSON, [])


def test_one_call_where_one_is_asked_for():
    _, _, calls = read([f"{CALL}<|call|>{CALL}<|call|>"], is_parallel=False)
    assert calls == [WEATHER]


def test_special_tokens_that_are_no_marks_are_taken_out():
    assert read([f"{THOUGHTS}<|endoftext|>{ANSWER}"])[:2] == ("They ask\nfor <weather>.", "Sunny & 3 °C.")


def test_tokens_of_thoughts_are_counted():
    reader = ChatReader(STYLE, TOOLS, splits=True, begins_inside=False, is_filtered=True)
    channel, message, end = (IDS[text] for text in ("<|channel|>", "<|message|>", "<|end|>"))
    reader.push("", (channel, IDS[ANALYSIS], message, 1, 2, 3))
    assert reader.num_reasoning_tokens == 3
    reader.push("", (4, end, IDS["<|start|>"], 9, channel, 5, message, 6, 7))
    assert reader.num_reasoning_tokens == 4


ECHO = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 4}}, "required": ["text"]}
CALLED = "<|channel|>commentary to=functions.echo <|constrain|>json<|message|>"
BEFORE = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_a_grammar_lets_it_think_and_tell_before_a_call_that_matches(mode):
    tools = [Tool(name="echo", parameters={**ECHO, "additionalProperties": False}, is_strict=True)]
    grammar = tool_grammar("openai", tools, ToolChoice(mode), reasoning=HARMONY)
    for before in ("", BEFORE, BEFORE * 2, PREAMBLE, BEFORE + PREAMBLE):
        assert accepts(grammar, f'{before}{CALLED}{{"text": "abcd"}}', "openai", False), before
        assert not accepts(grammar, f'{before}{CALLED}{{"text": "abcde"}}', "openai", False)
        is_answer = accepts(grammar, f"{before}<|channel|>final<|message|>Hi", "openai", False)
        assert is_answer == (mode == "auto")


# --- what a template writes is read back ---

CONVERSATION = [
    {"role": "user", "content": "How is the weather?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "They ask for the weather.",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": '{"sunny": true}'},
]


def rendered(messages, *, prompt: bool) -> str:
    return render_chat(TEMPLATE, messages, prompt, template_kwargs={"tools": [tool.for_template() for tool in TOOLS]})


def test_the_template_tells_the_format():
    assert detect_format(TEMPLATE) == "openai"
    assert template_traits(TEMPLATE, {}).shows_calls


def test_a_rendered_call_is_read_back_at_every_cut():
    whole, head = rendered(CONVERSATION[:2], prompt=False), rendered(CONVERSATION[:1], prompt=True)
    assert whole.startswith(head)
    written = whole.removeprefix(head)
    for cut in range(len(written) + 1):
        thoughts, content, calls = read([written[:cut], written[cut:]])
        assert (thoughts, content) == ("They ask for the weather.", "")
        assert [(name, json.loads(arguments), done) for name, arguments, done in calls] == [
            ("get_weather", ARGUMENTS, True)
        ]


def test_a_head_that_never_ends_is_content():
    splitter = HarmonySplitter(reads_calls=True)
    text = "<|channel|>" + "x" * 1000
    assert splitter.push(text).content + splitter.finish().content == text
