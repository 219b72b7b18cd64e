"""Formats by what a chat template writes. The templates are short ones in the style of published ones."""

import pytest

from holdfast.router.tools.chat_style import FORMATS, detect_format, parser_for

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "hermes": CHATML
    + "{% for call in m.tool_calls %}<tool_call>\n"
    + '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}",
    "mistral": "[INST] {{ m.content }} [/INST]{{ '[TOOL_CALLS][' }}{{ calls }}]</s>",
    "llama3_json": "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    + """{{ '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}<|eot_id|>""",
    "llama4_pythonic": "<|header_start|>{{ role }}<|header_end|>{{ '<|python_start|>' }}{{ calls }}<|python_end|>",
    "pythonic": "You may call functions: [func_name1(params_name1=params_value1), func_name2(params)]",
    "gemma4": "<|turn>model\n{{ '<|tool_call>call:' + call.name + '{' }}{{ arguments }}{{ '}<tool_call|>' }}",
    "lfm2": CHATML + "<|tool_call_start|>[{{ calls }}]<|tool_call_end|>",
    "deepseek_v32": "<｜DSML｜function_calls>\n{{ calls }}",
    "deepseek_v4": "<｜DSML｜tool_calls>\n{{ calls }}",
    "glm45": "{{ '\\n<tool_call>' + call.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>",
    "minimax_m2": "{{ '<minimax:tool_call>' }}\n<invoke name=\"{{ call.name }}\">",
    "deepseek_v3": "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}",
    "deepseek_v31": "{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_format(name: str):
    assert detect_format(TEMPLATES[name]) == name
    assert name in FORMATS
    assert parser_for(name).push("") == []


def test_a_template_without_calls_has_none():
    assert detect_format(CHATML) is None
    assert detect_format(None) is None
