"""Chat templates that take different things, after those of published models: what each refuses or drops is in its
name here.
"""

from typing import Final

CHATML: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""It shows every role, and knows no tools."""

HERMES: Final = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It writes null as the word None."""

HARMONY: Final = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n\nnamespace functions {\n"
    "{% for t in tools %}type {{ t.function.name }} = (_: {{ t.function.parameters | tojson }}) => any;\n{% endfor %}}"
    "<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.last = c.name %}"
    "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}"
    "<|start|>functions.{{ ns.last }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
).replace("{% for m in messages %}", "{% set ns = namespace(last='') %}{% for m in messages %}", 1)
"""Channels, one call in a turn."""

CODER: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
    "{% for name, value in c.function.arguments.items() %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}"
    "</function></tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Arguments must be an object."""

FIRST_SYSTEM: Final = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('Unexpected role.') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One system message, at the beginning; roles of tools are refused."""

DROPPING: Final = (
    "{% for m in messages %}{% if m.role == 'system' %}<system>{{ m.content }}{% elif m.role == 'user' %}"
    "<user>{{ m.content }}{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Roles that it does not know are dropped without a word."""

DEVELOPER: Final = DROPPING.replace("m.role == 'system'", "m.role in ('system', 'developer')").replace(
    "<system>", "<{{ m.role }}>"
)
"""It names the role of developers."""

NO_SYSTEM: Final = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
"""As Gemma's: no system message, and strictly alternating turns."""

SHORT_IDS: Final = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}<system>{{ messages[0].content }}"
    "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% for m in rest %}{% if not (m.role == 'tool' or m.tool_calls is defined) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in rest %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS]"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids of length 9!') }}{% endif %}"
    "{{ c.function | tojson }}{{ c.id }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of 9!') }}{% endif %}"
    "[RESULT]{{ m.content }}{{ m.tool_call_id }}{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
"""As Mistral's: ids of calls have nine letters."""

ONE_CALL: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once!') }}{% endif %}"
    "<assistant>{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Llama 3.1's: a turn has one call, and no text beside it."""

NULL_CONTENT: Final = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<assistant>{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As DeepSeek's: calls are shown beside null content alone, with arguments as JSON text."""
