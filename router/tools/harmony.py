"""Harmony: messages in channels, as gpt-oss writes them, separated into reasoning, content and calls.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

An output begins behind `<|start|>assistant`. Reasoning is in `analysis`, the answer in `final`, and text for the user
before a call in `commentary`. A call has a recipient, in its role or in its channel.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.router.tools.call_events import MAX_NAME, Reading, held_back
from holdfast.router.tools.json_calls import JsonCallParser
from holdfast.router.tools.reasoning import Split

HARMONY: Final = "openai_gptoss"
"""Name of its reasoning format, as for vLLM's `--reasoning-parser`."""

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS: Final = "analysis"
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
OPENING: Final = f"{CHANNEL}commentary to=functions."
"""Opening of calls in the splitter's output, wherever the model has put their recipient."""

_ENDS: Final = (END, CALL, RETURN, START, CHANNEL)
"""A body ends here, also where its own end was left out."""
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_NAMED_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_NAME_END: Final = re.compile(r"[\s<]")
_FUNCTIONS: Final = "functions."
_MAX_HEADER: Final = MAX_NAME + 100  # characters
_BETWEEN: Final = "\n\n"
"""Stands between messages of one kind."""


class HarmonySplitter:
    """Splits an output into reasoning and content, to which calls belong. A text without channels is content."""

    is_cut_off = False

    def __init__(self, *, reads_calls: bool) -> None:
        """Treats the arguments of calls as content without `reads_calls`."""
        self._reads_calls = reads_calls
        self._held = ""
        self._kind = "header"
        self._is_first_of_message = False
        self._has = {"reasoning": False, "content": False}
        self._out = {"reasoning": "", "content": ""}

    def push(self, text: str) -> Split:
        """Splits further text of the model into reasoning, content and tool calls."""
        self._held += text
        while self._step(is_last=False):
            pass
        return self._taken()

    def finish(self) -> Split:
        """Text held back until the output's end. The head of a message that has no body is dropped."""
        while self._step(is_last=True):
            pass
        if self._kind != "header":
            self._emit(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> Split:
        taken = Split(self._out["reasoning"], self._out["content"])
        self._out = {"reasoning": "", "content": ""}
        return taken

    def _step(self, *, is_last: bool) -> bool:
        """Reads on; False where more text is needed."""
        return self._read_header() if self._kind == "header" else self._read_body(is_last=is_last)

    def _read_header(self) -> bool:
        text = self._held.lstrip()
        if not _may_be_header(text) or (MESSAGE not in text and len(text) > _MAX_HEADER):
            self._begin("content")
            self._emit(self._held[:1])  # so that it is not taken for a header again
            self._held = self._held[1:]
            return bool(self._held)
        end = text.find(MESSAGE)
        if end < 0:
            return False
        header, self._held = text[:end], text[end + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _NAMED_CHANNEL.search(header)
        name = recipient[1] if recipient else ""
        if name.startswith(_FUNCTIONS) and self._reads_calls:
            self._begin("call")
            self._out["content"] += f"{OPENING}{name.removeprefix(_FUNCTIONS)}{MESSAGE}"
        else:
            is_answer = name.startswith(_FUNCTIONS) or not (name or (channel and channel[1] == ANALYSIS))
            self._begin("content" if is_answer else "reasoning")
        return True

    def _read_body(self, *, is_last: bool) -> bool:
        text = self._held
        found = [(place, mark) for mark in _ENDS if (place := text.find(mark)) >= 0]
        if not found:
            kept = len(text) - (0 if is_last else held_back(text, _ENDS))
            self._emit(text[:kept])
            self._held = text[kept:]
            return False
        place, mark = min(found)
        self._emit(text[:place])
        if self._kind == "call":
            self._out["content"] += CALL
        self._kind = "header"
        self._held = text[place + (0 if mark in (START, CHANNEL) else len(mark)) :]
        return True

    def _begin(self, kind: str) -> None:
        self._kind, self._is_first_of_message = kind, True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._out["content"] += text
            return
        between = _BETWEEN if self._is_first_of_message and self._has[self._kind] else ""
        self._out[self._kind] += between + text
        self._is_first_of_message, self._has[self._kind] = False, True


def _may_be_header(text: str) -> bool:
    """Whether a message's head may begin so."""
    return any(
        text.startswith(first) or first.startswith(text) for first in (START, CHANNEL, CONSTRAIN, "to=", MESSAGE)
    )


class HarmonyCallParser(JsonCallParser):
    """Calls as the splitter passes them on."""

    MARKERS = (OPENING,)
    CLOSINGS = (CALL,)

    def _read_calls(self, opening: str) -> Reading[None]:
        header = yield from self._source.take_until(MESSAGE, _MAX_HEADER)
        name = _NAME_END.split(header.strip(), maxsplit=1)[0]
        yield from self._skip_space()
        yield from self._read_arguments_of(name)
        yield from self._skip_space()
        yield from self._source.pass_over(CALL)


class HarmonyThoughtCounter:
    """Counts the tokens of messages in `analysis`, whose marks are single tokens."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: of the marks and of `ANALYSIS`, by their texts."""
        self._texts = {token_id: text for text, token_id in token_ids.items()}
        self._channel: list[str] | None = None
        self._is_inside = False
        self.num_tokens = 0

    def cut_off(self) -> None:
        """Does nothing: reasoning has separate marks."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens within the analysis channel."""
        for token_id in token_ids:
            text = self._texts.get(token_id, "")
            if text == CHANNEL:
                self._channel, self._is_inside = [], False
            elif text == MESSAGE:
                self._is_inside, self._channel = (self._channel or [""])[0] == ANALYSIS, None
            elif text in MARKS:
                self._is_inside = False
            elif self._channel is not None:
                self._channel.append(text)
            elif self._is_inside:
                self.num_tokens += 1
