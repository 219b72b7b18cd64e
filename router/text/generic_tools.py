"""Generic style of tool calls, for models whose chat template knows none: tools in the system message, calls and
results as text.

Calls are written as Hermes models write them, so `router/tools/` reads and enforces them in the format `hermes`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

FORMAT: Final = "hermes"
"""Of `router/tools/formats.py`."""

_BEFORE: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_END: Final = "\n</tools>"
_HOW: Final = """

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def tools_text(tools: Sequence[Mapping[str, Any]], *, says_how: bool = True) -> str:
    """What the system message says of tools, in OpenAI's shape. `says_how` calls are written: not to a model whose
    template writes calls in a format of its own.
    """
    told = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _END
    return told + _HOW if says_how else told


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls of an earlier turn as the model would have written them."""
    return "\n".join(f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls)


def _call_text(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {written}}}'


def result_text(content: str) -> str:
    """A call's result, in a user's message."""
    return f"<tool_response>\n{content}\n</tool_response>"
