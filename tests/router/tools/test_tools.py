"""Tools and tool choice: what is refused, with field and reason."""

import pytest

from holdfast.router.tools.tools import Tool, ToolChoice, checked_tool, checked_tool_choice, checked_tools
from holdfast.worker.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: object = "f", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_are_read():
    given = [tool("get-weather_1", description="Now.", parameters=SCHEMA, strict=True), tool("g", parameters=None)]
    assert checked_tools(given) == (
        Tool(name="get-weather_1", description="Now.", parameters=SCHEMA, is_strict=True),
        Tool(name="g"),
    )
    assert checked_tools(None) == checked_tools([]) == ()
    assert checked_tools([tool("f", description="d")])[0].for_template() == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {}},
    }
    assert checked_tool("tools[0]", "f", SCHEMA) == Tool(name="f", parameters=SCHEMA)


@pytest.mark.parametrize(
    ("tools", "field", "reason"),
    [
        ({}, "tools", "list"),
        (["f"], "tools[0]", "object"),
        ([tool(), {"type": "code_interpreter"}], "tools[1].type", "function"),
        ([{"type": "function"}], "tools[0].function", "object with a name"),
        ([tool(None)], "tools[0].function.name", "1 to 64"),
        ([tool("x" * 65)], "tools[0].function.name", "1 to 64"),
        ([tool("get weather")], "tools[0].function.name", "1 to 64"),
        ([tool("f\n")], "tools[0].function.name", "1 to 64"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name", "differ"),
        ([tool(description=3)], "tools[0].function.description", "text"),
        ([tool(strict="yes")], "tools[0].function.strict", "true or false"),
        ([tool(parameters=[])], "tools[0].function.parameters", "JSON schema"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type", "object"),
        ([tool(parameters={"properties": ["a"]})], "tools[0].function.parameters.properties", "schemas"),
        ([tool(parameters={"properties": {"a": 1}})], "tools[0].function.parameters.properties", "schemas"),
        ([tool(parameters={"required": "a"})], "tools[0].function.parameters.required", "list of names"),
        ([tool(parameters={"default": float("nan")})], "tools[0].function.parameters", "JSON"),
        ([tool(parameters={"title": "\ud800"})], "tools[0].function.parameters", "JSON"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: object, field: str, reason: str):
    with pytest.raises(InvalidRequestError) as refused:
        checked_tools(tools)
    assert refused.value.field == field
    assert reason in refused.value.limit


TOOLS = (Tool(name="f"), Tool(name="g"))


def test_tool_choices_are_read():
    assert checked_tool_choice(None, TOOLS) == checked_tool_choice("auto", TOOLS) == ToolChoice("auto")
    assert checked_tool_choice(None, ()) == checked_tool_choice("none", ()) == ToolChoice("none")
    assert checked_tool_choice("required", TOOLS) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "g"}}
    assert checked_tool_choice(named, TOOLS) == ToolChoice("named", "g")


@pytest.mark.parametrize(
    ("choice", "tools", "field", "reason"),
    [
        ("any", TOOLS, "tool_choice", "none, auto, required"),
        (3, TOOLS, "tool_choice", "none, auto, required"),
        ("required", (), "tool_choice", "only with tools"),
        ({"type": "function", "function": {"name": "g"}}, (), "tool_choice", "only with tools"),
        ({"type": "allowed_tools"}, TOOLS, "tool_choice.type", "function"),
        ({"type": "function"}, TOOLS, "tool_choice.function", "object with a name"),
        ({"type": "function", "function": {"name": "h"}}, TOOLS, "tool_choice.function.name", "one of the tools: f, g"),
        ({"type": "function", "function": {"name": ["f"]}}, TOOLS, "tool_choice.function.name", "one of the tools"),
    ],
)
def test_wrong_choices_are_refused_by_name(choice: object, tools: tuple[Tool, ...], field: str, reason: str):
    with pytest.raises(InvalidRequestError) as refused:
        checked_tool_choice(choice, tools)
    assert refused.value.field == field
    assert reason in refused.value.limit
