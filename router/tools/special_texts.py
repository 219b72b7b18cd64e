"""Special token filter: takes the texts of special tokens out of an output that had to keep some of them.

Some tokenizers have special tokens for the markers of calls or reasoning, and a text without special tokens has none of
them. Such an output is decoded with `skip_special_tokens=False`, and this takes the others out, such as the end of
sequence. It goes by text: the same characters spelled out of ordinary tokens are taken out, too.

What may not live here: tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache
from typing import Final, NamedTuple


def unwanted_texts(special_texts: Collection[str], markers: Collection[str]) -> tuple[str, ...] | None:
    """What a filter takes out where special tokens must be kept for the markers; None where they need not be."""
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
        """What was held back. The output has ended."""
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
        """Where the end of `text` may begin one of the texts without being all of it; else the end."""
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
