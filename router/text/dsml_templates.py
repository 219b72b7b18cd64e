"""Chat templates of DeepSeek V3.2 and V4, whose files have a Python encoder in place of a template.

Written after `encoding/encoding_dsv32.py` and `encoding/encoding_dsv4.py` of the checkpoints (MIT), whose \
words to the
model are kept. `thinking` or `enable_thinking` asks for thoughts, `reasoning_effort="max"` of V4 for long ones.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_HEAD: Final = """\
{%- set thinks = thinking | default(enable_thinking | default(false)) -%}
{%- set ns = namespace(last=-1, told=false) -%}
{%- macro opened(is_now) -%}{{ '<think>' if thinks and is_now else '</think>' }}{%- endmacro -%}
{%- macro called(calls, block) -%}
{{- '\\n\\n<｜DSML｜' + block + '>\\n' -}}
{%- for call in calls -%}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' -}}
{{- value if value is string else value | tojson -}}
{{- '</｜DSML｜parameter>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{{- '\\n</｜DSML｜invoke>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{{- '\\n</｜DSML｜' + block + '>' -}}
{%- endmacro -%}
{%- macro schemas() -%}
{%- for tool in tools -%}{{ tool.function | tojson }}{{ '' if loop.last else '\\n' }}{%- endfor -%}
{%- endmacro -%}
"""

_TOOLS_32: Final = """\
{%- macro told() -%}
{{- '\\n\\n## Tools\\nYou have access to a set of tools you can use to answer the user\\'s question.\\nYou can \
invoke functions by \
writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:\\n<｜DSML｜function_calls>\\n\
<｜DSML｜invoke name="$FUNCTION_NAME">\\n<｜DSML｜parameter name="$PARAMETER_NAME" \
string="true|false">$PARAMETER_VALUE\
</｜DSML｜parameter>\\n...\\n</｜DSML｜invoke>\\n<｜DSML｜invoke name="$FUNCTION_NAME2">\\n...\\n</｜DSML｜invoke>\\n\
</｜DSML｜function_calls>\\nString and scalar parameters should be specified as is without any escaping or \
quotes, while \
lists and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and \
"false" for other types (numbers, booleans, arrays, objects).\\nIf the thinking_mode is enabled, then after \
function results \
you should strongly consider outputting a thinking block. Here is an example:\\n<｜DSML｜function_calls>\\n...\\n\
</｜DSML｜function_calls>\\n<function_results>\\n...\\n</function_results>\\n<think>...thinking about \
results</think>\\n\
Here are the functions available in JSONSchema format:\\n<functions>\\n' + schemas() + '\\n</functions>\\n' -}}
{%- endmacro -%}
"""

_TOOLS_4: Final = """\
{%- macro told() -%}
{{- '\\n\\n## Tools\\n\\nYou have access to a set of tools to help answer the user\\'s question. You can invoke \
tools by writing a \
"<｜DSML｜tool_calls>" block like the following:\\n\\n<｜DSML｜tool_calls>\\n<｜DSML｜invoke name="$TOOL_NAME">\\n\
<｜DSML｜parameter name="$PARAMETER_NAME" \
string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\\n...\\n</｜DSML｜invoke>\\n\
<｜DSML｜invoke name="$TOOL_NAME2">\\n...\\n</｜DSML｜invoke>\\n</｜DSML｜tool_calls>\\n\\nString parameters \
should be specified \
as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON \
format and \
set `string="false"`.\\n\\nIf thinking_mode is enabled (triggered by <think>), you MUST output your complete \
reasoning \
inside <think>...</think> BEFORE any tool calls or final response.\\n\\nOtherwise, output directly after \
</think> with tool \
calls or final response.\\n\\n### Available Tool Schemas\\n\\n' + schemas() + '\\n\\nYou MUST strictly follow \
the above defined \
tool name and parameter schemas to invoke tool calls.\\n' -}}
{%- endmacro -%}
"""

_V32: Final = """\
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if tools and (not messages or messages[0].role != 'system') -%}{{- told() -}}{%- set ns.told = true -%}{%- \
endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{- m.content -}}
{%- if tools and not ns.told -%}{{- told() -}}{%- set ns.told = true -%}{%- endif -%}
{%- elif m.role == 'user' -%}
{{- '<｜User｜>' + m.content + '<｜Assistant｜>' + opened(loop.index0 == ns.last) -}}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' -%}{{- '\\n\\n<function_results>' -}}{%- endif -%}
{{- '\\n<result>' + m.content + '</result>' -}}
{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' -%}
{{- '\\n</function_results>\\n\\n' + opened(loop.index0 >= ns.last) -}}
{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- if thinks and loop.index0 > ns.last -%}{{- (m.reasoning_content or m.reasoning or '') + '</think>' -}}{%- \
endif -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}{{- called(m.tool_calls, 'function_calls') -}}{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
"""

_V4: Final = """\
{%- set users = ['user', 'tool'] -%}
{%- for m in messages -%}{%- if m.role in users -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if thinks and reasoning_effort | default('') == 'max' -%}
{{- 'Reasoning Effort: Absolute maximum with no shortcuts permitted.\\nYou MUST be very thorough in your \
thinking and \
comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against \
all potential \
paths, edge cases, and adversarial scenarios.\\nExplicitly write out your entire deliberation process, \
documenting every \
intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.\\n\\n' -}}
{%- endif -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}{{- told() -}}{%- set ns.told = true -%}{%- \
endif -%}
{%- for m in messages -%}
{%- set ends = loop.nextitem is not defined or loop.nextitem.role not in users -%}
{%- if m.role == 'system' -%}
{{- m.content -}}
{%- if tools and not ns.told -%}{{- told() -}}{%- set ns.told = true -%}{%- endif -%}
{%- elif m.role in users -%}
{{- '<｜User｜>' if loop.previtem is not defined or loop.previtem.role not in users else '\\n\\n' -}}
{{- m.content if m.role == 'user' else '<tool_result>' + m.content + '</tool_result>' -}}
{%- if ends -%}{{- '<｜Assistant｜>' + opened(tools or loop.index0 >= ns.last) -}}{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- if thinks and (tools or loop.index0 > ns.last) -%}
{{- (m.reasoning_content or m.reasoning or '') + '</think>' -}}
{%- endif -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}{{- called(m.tool_calls, 'tool_calls') -}}{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
"""

DSML_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {"deepseek_v32": _HEAD + _TOOLS_32 + _V32, "deepseek_v4": _HEAD + _TOOLS_4 + _V4}
)
"""Templates by the `model_type` of config.json."""
