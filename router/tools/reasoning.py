"""Reasoning splitter: separates a model's reasoning from its answer while the text arrives.

White space around the reasoning belongs to the tags and is dropped.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from holdfast.router.tools.call_events import held_back
from holdfast.worker.errors import InvalidRequestError


class Split(NamedTuple):
    """The next piece of each; both may be empty."""

    reasoning: str
    content: str


class Tags(NamedTuple):
    """Tags that a template writes around reasoning."""

    opening: str
    closing: str


class ReasoningSplitter(Protocol):
    """The pieces of each kind concatenate to the same text, however the output is cut."""

    @property
    def is_cut_off(self) -> bool:
        """Whether a call has ended the reasoning."""

    def push(self, text: str) -> Split:
        """Splits further text of the model into reasoning and the rest."""
        ...

    def finish(self) -> Split:
        """Text held back until the output's end."""


REASONING_TAGS: Final[Mapping[str, Tags]] = MappingProxyType(
    {
        "qwen3": Tags("<think>", "</think>"),
        "deepseek_r1": Tags("<think>", "</think>"),
        "mistral": Tags("[THINK]", "[/THINK]"),
        "seed_oss": Tags("<seed:think>", "</seed:think>"),
        "gemma4": Tags("<|channel>", "<channel|>"),
    }
)
"""Named as for vLLM's `--reasoning-parser`."""

_LABELS: Final[Mapping[str, str]] = MappingProxyType({"gemma4": "thought\n"})
"""Text that a model writes behind the opening tag, and that is no part of its thoughts."""


class TaggedReasoning:
    """Reasoning between tags, at the start of an output. Without the opening tag there, all is content."""

    def __init__(self, tags: Tags, *, starts_inside: bool = False, call: str = "", label: str = "") -> None:
        """`call`: how calls begin, if one within the reasoning ends it as the closing tag does, and is content.
        `label`: text at the start of the reasoning that is dropped.
        """
        self._tags = tags
        self._label = label
        self._ends = (tags.closing, call) if call else (tags.closing,)
        self.is_cut_off = False
        self._state = "inside" if starts_inside else "before"
        self._held = ""
        self._has_begun = False
        """Whether the reasoning, or the content after it, has a character that is no space."""

    def push(self, text: str) -> Split:
        self._held += text
        reasoning = content = ""
        if self._state == "before":
            self._look_for_opening()
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "after":
            content = self._after()
        return Split(reasoning, content)

    def finish(self) -> Split:
        held, self._held = self._held, ""
        if self._state == "inside":
            return Split(held if self._has_begun else held.lstrip(), "")
        return Split("", held)

    def _look_for_opening(self) -> None:
        text, opening = self._held.lstrip(), self._tags.opening
        if text.startswith(opening):
            self._state, self._held = "inside", text[len(opening) :]
        elif not opening.startswith(text):
            self._state, self._has_begun = "after", True

    def _inside(self) -> str:
        """White space waits: it may stand before the closing tag."""
        if not self._has_begun:
            self._held = self._held.lstrip()
            if self._label and self._label.startswith(self._held):
                return ""
            self._held, self._label = self._held.removeprefix(self._label).lstrip(), ""
        text, closing = self._held, self._tags.closing
        end = min((found for found in map(text.find, self._ends) if found >= 0), default=-1)
        if end >= 0:
            self.is_cut_off = not text.startswith(closing, end)
            rest = end if self.is_cut_off else end + len(closing)
            self._state, self._held, self._has_begun = "after", text[rest:], False
            return text[:end].rstrip()
        reasoning = text[: len(text) - held_back(text, self._ends)].rstrip()
        self._has_begun = self._has_begun or bool(reasoning)
        self._held = text[len(reasoning) :]
        return reasoning

    def _after(self) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip()
            self._has_begun = bool(self._held)
        content, self._held = self._held, ""
        return content


class ThoughtCounter:
    """Counts the tokens between the tags, which are single tokens; text after the first closing tag is content."""

    def __init__(self, opening: int, closing: int, *, starts_inside: bool, call: int | None = None) -> None:
        """`call`: the token that calls begin with, if one within the reasoning may end it."""
        self._opening, self._closing, self._call = opening, closing, call
        self._is_inside, self._is_over = starts_inside, False
        self._num_before_call = 0
        self.num_tokens = 0

    def cut_off(self) -> None:
        """The last call token seen has ended the reasoning."""
        if not self._is_over:
            self._is_over = True
            self.num_tokens = self._num_before_call if self._call is not None else self.num_tokens

    def push(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens between the opening and the closing mark."""
        if self._is_over:
            return
        begin = 0
        if not self._is_inside:
            if self._opening not in token_ids:
                return
            self._is_inside, begin = True, token_ids.index(self._opening) + 1
        self._is_over = self._closing in token_ids[begin:]
        end = token_ids.index(self._closing, begin) if self._is_over else len(token_ids)
        if self._call in token_ids[begin:end]:
            last = max(place for place in range(begin, end) if token_ids[place] == self._call)
            self._num_before_call = self.num_tokens + last - begin
        self.num_tokens += end - begin


def splitter_for(name: str, *, starts_inside: bool = False, call: str = "") -> ReasoningSplitter:
    """A splitter for one output. `starts_inside`: see `starts_in_reasoning`; `call`: see `TaggedReasoning`.

    Raises `InvalidRequestError` for an unknown name.
    """
    if name not in REASONING_TAGS:
        raise InvalidRequestError("reasoning_parser", name, f"must be one of {', '.join(REASONING_TAGS)}")
    label = _LABELS.get(name, "")
    return TaggedReasoning(REASONING_TAGS[name], starts_inside=starts_inside, call=call, label=label)


def starts_in_reasoning(name: str, prompt: str) -> bool:
    """Whether the prompt's last text is the opening tag, so that the output begins within the reasoning."""
    return prompt.rstrip().endswith(REASONING_TAGS[name].opening)


def detect_reasoning(chat_template: str | None) -> str | None:
    """The kind of reasoning that the template writes or removes; None if the template has none of the known tags."""
    template = chat_template or ""
    return next((name for name, tags in REASONING_TAGS.items() if tags.closing in template), None)


def unwanted_texts(special_texts: Collection[str], markers: Collection[str]) -> tuple[str, ...] | None:
    """Texts that a filter takes out where special tokens must be kept for the markers; None if they need not be."""
    if not set(special_texts) & set(markers):
        return None
    return tuple(sorted(text for text in set(special_texts) - set(markers) if text))


class SpecialTextFilter:
    """The results of `push` and `finish` concatenate to the same text, however the output is cut."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._table: Final = _table(texts)
        self._held = ""

    def push(self, text: str) -> str:
        return self._filtered(text, is_last=False)

    def finish(self) -> str:
        """Text held back until the output's end."""
        return self._filtered("", is_last=True)

    def _filtered(self, text: str, *, is_last: bool) -> str:
        """Waits where a text may begin that is not there yet, even if a shorter one is."""
        text, position, pieces = self._held + text, 0, list[str]()
        while True:
            found = self._table.any_of.search(text, position) if self._table.texts else None
            held = len(text) if is_last else self._table.first_unfinished(text, position)
            if found is None or found.start() >= held:
                self._held = text[held:]
                return "".join([*pieces, text[position:held]])
            pieces.append(text[position : found.start()])
            position = found.end()


class _Table(NamedTuple):
    """Texts, sorted, and what finds them."""

    texts: tuple[str, ...]
    any_of: re.Pattern[str]
    first_characters: re.Pattern[str]
    longest: int

    def first_unfinished(self, text: str, position: int) -> int:
        """Position where the end of `text` may begin one of the texts without being all of it; else the end."""
        if not self.texts:
            return len(text)
        starts = self.first_characters.finditer(text, max(position, len(text) - self.longest + 1))
        return next((start.start() for start in starts if self._begins_one(text[start.start() :])), len(text))

    def _begins_one(self, text: str) -> bool:
        index = bisect_left(self.texts, text)
        index += index < len(self.texts) and self.texts[index] == text
        return index < len(self.texts) and self.texts[index].startswith(text)


@lru_cache(maxsize=32)
def _table(texts: tuple[str, ...]) -> _Table:
    longest_first = sorted(texts, key=len, reverse=True)
    any_of = re.compile("|".join(map(re.escape, longest_first)))
    first_characters = re.compile("|".join(sorted({re.escape(text[0]) for text in texts})))
    return _Table(tuple(sorted(texts)), any_of, first_characters, max(map(len, texts), default=0))
