"""Chat style of a model: the formats of tool calls and reasoning in its chat template, and their parsers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self, TypeAlias

from holdfast.router.text import template_traits as generic_tools
from holdfast.router.text.chat import template_traits
from holdfast.router.text.template_traits import TemplateTraits
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.call_events import CallBegin, CallEvent, Content
from holdfast.router.tools.call_grammar import markers, single_tokens, tool_grammar
from holdfast.router.tools.call_parser import ToolCallParser
from holdfast.router.tools.gemma_calls import Gemma4CallParser
from holdfast.router.tools.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    HARMONY,
    MARKS,
    MESSAGE,
    HarmonyCallParser,
    HarmonySplitter,
    HarmonyThoughtCounter,
)
from holdfast.router.tools.json_calls import (
    KIMI_SECTION,
    DeepSeekCallParser,
    HermesCallParser,
    KimiCallParser,
    LlamaCallParser,
    MistralCallParser,
)
from holdfast.router.tools.pythonic_calls import Lfm2CallParser, Llama4CallParser, PythonicCallParser
from holdfast.router.tools.reasoning import (
    REASONING_TAGS,
    ReasoningSplitter,
    SpecialTextFilter,
    Tags,
    ThoughtCounter,
    detect_reasoning,
    splitter_for,
    starts_in_reasoning,
    unwanted_texts,
)
from holdfast.router.tools.tools import Tool, ToolChoice
from holdfast.router.tools.xml_calls import DSML, DsmlCallParser, GlmCallParser, MiniMaxCallParser, XmlCallParser
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
        "gemma4": lambda tools: Gemma4CallParser(),
        "deepseek_v3": lambda tools: DeepSeekCallParser(),
        "deepseek_v31": lambda tools: DeepSeekCallParser(),
        "deepseek_v32": DsmlCallParser,
        "deepseek_v4": DsmlCallParser,
        "glm45": GlmCallParser,
        "glm47": GlmCallParser,
        "minimax_m2": MiniMaxCallParser,
        "kimi_k2": lambda tools: KimiCallParser(),
        "openai": lambda tools: HarmonyCallParser(),
    }
)
"""Named as for vLLM's `--tool-call-parser`."""

_SIGNS: Final = (  # a row matches if the template writes all of its texts; the first match decides
    ("openai", (CHANNEL, MESSAGE, CALL)),
    ("gemma4", ("<|tool_call>", "call:")),
    ("deepseek_v32", (f"<{DSML}function_calls>",)),
    ("deepseek_v4", (f"<{DSML}tool_calls>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("kimi_k2", (KIMI_SECTION,)),
    ("glm45", ("<tool_call>", "<arg_key>")),
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
    """The format that the template writes calls in, and so the model too; None if it writes none of the known
    formats.
    """
    template = chat_template or ""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle:
    """Chat formats of one model."""

    call_format: str | None = None
    """Call format of `FORMATS`; None: its template writes no known calls."""
    is_generic: bool = False
    """Whether its template has no place for tools: they are described in the system message."""
    reasoning: str | None = None
    """Reasoning tags of `REASONING_TAGS`, or `HARMONY`; None: its template has no reasoning."""
    unwanted: tuple[str, ...] | None = None
    """Special texts to take out of an output that keeps its special tokens; None: none need to be kept."""
    token_ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The markers that are single tokens."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None) -> Self:
        """Style by one of its chat templates and the tokenizer. Raises `ConfigurationError` for a template that does
        not compile.
        """
        call_format = detect_format(template)
        reasoning = HARMONY if call_format == "openai" else detect_reasoning(template)
        traits = TemplateTraits() if template is None else template_traits(template, tokenizer.special_tokens)
        if not traits.shows_tools and not traits.shows_calls:
            call_format = generic_tools.FORMAT
        looked_for = markers(call_format, reasoning)
        special = {tokenizer.decode((i,), skip_special_tokens=False) for i in tokenizer.special_token_ids}
        return cls(
            call_format=call_format,
            is_generic=not traits.shows_tools,
            reasoning=reasoning,
            unwanted=unwanted_texts(special, looked_for),
            token_ids=single_tokens(looked_for, lambda text: tokenizer.encode(text, add_special_tokens=False)),
        )

    def begins_inside(self, prompt: str) -> bool:
        """Whether an output after this prompt begins within the reasoning."""
        name = self.reasoning
        return name is not None and name != HARMONY and starts_in_reasoning(name, prompt)

    def splitter(self, begins_inside: bool, call: str, *, reads_calls: bool) -> ReasoningSplitter | None:
        """Splits the reasoning off; None: there is none. `call`: how calls begin that may end the reasoning."""
        if self.reasoning == HARMONY:
            return HarmonySplitter(reads_calls=reads_calls)
        if self.reasoning is None:
            return None
        return splitter_for(self.reasoning, starts_inside=begins_inside, call=call)

    def thought_counter(self, begins_inside: bool, call: str = "") -> ThoughtCounter | HarmonyThoughtCounter | None:
        """None where a tag is several tokens. `call`: how calls begin that may end the reasoning."""
        if self.reasoning == HARMONY:
            is_known = all(text in self.token_ids for text in (*MARKS, ANALYSIS))
            return HarmonyThoughtCounter(self.token_ids) if is_known else None
        tags = REASONING_TAGS[self.reasoning] if self.reasoning else ()
        ids = [self.token_ids[tag] for tag in tags if tag in self.token_ids]
        if len(ids) != len(Tags._fields):
            return None
        marker = next((token_id for text, token_id in self.token_ids.items() if text and call.startswith(text)), None)
        return ThoughtCounter(ids[0], ids[1], starts_inside=begins_inside, call=marker)

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, prompt: str, *, is_parallel: bool) -> str:
        """Same as `tool_grammar`."""
        if self.call_format is None:
            return ""
        return tool_grammar(
            self.call_format,
            tools,
            choice,
            is_parallel=is_parallel,
            token_ids=self.token_ids,
            reasoning=self.reasoning,
            starts_in_reasoning=self.begins_inside(prompt),
        )


class ChatReader:
    """Tells reasoning, content and calls of one output apart, as its text comes."""

    def __init__(
        self,
        style: ChatStyle,
        tools: Sequence[Tool],
        *,
        splits: bool,
        begins_inside: bool,
        is_filtered: bool,
        is_parallel: bool = True,
    ) -> None:
        """Reads no calls without `tools`, no reasoning without `splits`. With `is_filtered` the output keeps its
        special tokens for the sake of markers, and the others are taken out. Without `is_parallel`, calls after the
        first one are dropped, with the text after them.
        """
        self._is_parallel = is_parallel
        self._is_over = False
        self._filter = SpecialTextFilter(style.unwanted) if is_filtered and style.unwanted is not None else None
        self._splitter: ReasoningSplitter | None = None
        self._thoughts: ThoughtCounter | HarmonyThoughtCounter | None = None
        self._parser: ToolCallParser | None = None
        if tools and style.call_format is not None:
            self._parser = parser_for(style.call_format, tools)
        if splits:
            call = "" if self._parser is None else self._parser.IN_THOUGHTS
            self._splitter = style.splitter(begins_inside, call, reads_calls=self._parser is not None)
            self._thoughts = style.thought_counter(begins_inside, call)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        num_calls = 0 if self._parser is None else self._parser.num_calls
        return num_calls if self._is_parallel else min(num_calls, 1)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens within the reasoning so far; None if its tags are not single tokens, or it is not split."""
        return None if self._thoughts is None else self._thoughts.num_tokens

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Reasoning | CallEvent]:
        """Events that are certain now. The token ids belong to the text; they are only counted."""
        if self._thoughts is not None:
            self._thoughts.push(token_ids)
        return self._split(text if self._filter is None else self._filter.push(text))

    def finish(self) -> list[Reasoning | CallEvent]:
        """Events held back until the output's end."""
        events = self._split("" if self._filter is None else self._filter.finish())
        if self._splitter is not None:
            split = self._splitter.finish()
            events += [*_thought(split.reasoning), *self._content(split.content)]
        return events + (self._wanted(self._parser.finish()) if self._parser is not None else [])

    def _split(self, text: str) -> list[Reasoning | CallEvent]:
        if self._splitter is None:
            return self._content(text)
        split = self._splitter.push(text)
        if self._splitter.is_cut_off and self._thoughts is not None:
            self._thoughts.cut_off()
        return [*_thought(split.reasoning), *self._content(split.content)]

    def _content(self, text: str) -> list[Reasoning | CallEvent]:
        if self._parser is not None:
            return self._wanted(self._parser.push(text))
        return [Content(text)] if text else []

    def _wanted(self, events: list[CallEvent]) -> list[Reasoning | CallEvent]:
        wanted: list[Reasoning | CallEvent] = []
        for event in events:
            self._is_over |= not self._is_parallel and isinstance(event, CallBegin) and event.index > 0
            if not self._is_over:
                wanted.append(event)
        return wanted


def _thought(text: str) -> list[Reasoning | CallEvent]:
    return [Reasoning(text)] if text else []
