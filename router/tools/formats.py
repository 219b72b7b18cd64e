"""Tool call formats by name, and which one a chat template writes.

What may not live here: parsing.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.json_calls import DeepSeekCallParser, HermesCallParser, LlamaCallParser, MistralCallParser
from holdfast.router.tools.pythonic_calls import Lfm2CallParser, Llama4CallParser, PythonicCallParser
from holdfast.router.tools.tools import Tool
from holdfast.router.tools.xml_calls import XmlCallParser
from holdfast.worker.errors import InvalidRequestError

_Make: TypeAlias = Callable[[Sequence[Tool]], ToolCallParser]

FORMATS: Final[Mapping[str, _Make]] = MappingProxyType(
    {
        "hermes": lambda tools: HermesCallParser(),
        "qwen3_coder": XmlCallParser,
        "qwen3_xml": XmlCallParser,
        "llama3_json": lambda tools: LlamaCallParser(),
        "llama4_json": lambda tools: LlamaCallParser(),
        "llama4_pythonic": lambda tools: Llama4CallParser(),
        "pythonic": lambda tools: PythonicCallParser(),
        "lfm2": lambda tools: Lfm2CallParser(),
        "mistral": lambda tools: MistralCallParser(),
        "deepseek_v3": lambda tools: DeepSeekCallParser(),
        "deepseek_v31": lambda tools: DeepSeekCallParser(),
    }
)
"""Named as for vLLM's `--tool-call-parser`."""

_SIGNS: Final = (  # what a template writes, all of a row; the first row that fits decides
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)


def parser_for(name: str, tools: Sequence[Tool] = ()) -> ToolCallParser:
    """A parser for one output. `tools` say which arguments are text, where the format does not.

    Raises `InvalidRequestError` for an unknown name.
    """
    if name not in FORMATS:
        raise InvalidRequestError("tool_call_parser", name, f"must be one of {', '.join(FORMATS)}")
    return FORMATS[name](tools)


def detect_format(chat_template: str | None) -> str | None:
    """The format that the template writes calls in, and so the model too; None if it writes none that is known."""
    template = chat_template or ""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
