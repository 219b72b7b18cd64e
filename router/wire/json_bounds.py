"""Static bounds of JSON text: a scan of its bytes, field by field, before a parser builds anything.

As with protobuf (`worker/wire/message_bounds.py`), the scan stops at the first field beyond its bound, so that its cost
is limited by the bounds. Parsers hold Python's lock to their end, and a list of numbers costs them a hundred times its
bytes: so token ids are read apart, in pieces.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.wire.bound import Bound

MAX_STRINGS: Final = 2**16
"""Most strings of one text, keys included."""

MAX_KEYS: Final = 1024
"""Most fields of its object."""

MAX_DIGITS: Final = 64
"""A number of twice as many digits is refused for sure, one of fewer is taken."""

_QUOTE: Final = ord('"')
_PIECE: Final = 2**16
"""Bytes that are looked at, or parsed, at one go."""

_SHORT: Final = 16
_INSIDE: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Bounds of the fields of one sort of JSON object, by name. They count values: what commas and brackets part."""

    fields: Mapping[str, Bound]
    other: Bound
    """Of each field that is not among them."""
    whole: Bound
    """Of all fields together."""
    string: int
    """Bytes of the longest string, as JSON writes it."""
    lists: Mapping[str, Bound] = field(default_factory=dict)
    """Wider ones of fields that hold lists of numbers, for callers that read these apart (`token_ids`)."""

    def check(self, text: bytes, apart: Collection[str] = ()) -> dict[str, slice]:
        """Where the values of long fields without strings are, by name. Those of `apart` are read apart.

        Raises `InvalidRequestError`, naming the first field beyond its bound.
        """
        return _Scan(self, text, apart).run()

    def take_apart(self, text: bytes, names: Collection[str]) -> tuple[bytes, dict[str, "TokenIds"]]:
        """The text with long lists of token ids in these fields left empty, and the lists by field.

        Raises `InvalidRequestError` as `check` does, and for what is no list of token ids.
        """
        long = self.check(text, names)
        lists = {name: token_ids(name, text[long[name]]) for name in names if name in long}
        for place in sorted((long[name] for name in lists), key=lambda one: -int(one.start)):
            text = b"%b[]%b" % (text[: place.start], text[place.stop :])
        return text, lists


class _Scan:
    """One text."""

    def __init__(self, bounds: JsonBounds, text: bytes, apart: Collection[str]) -> None:
        self._bounds = bounds
        self._lists = {name: bounds.lists[name] for name in apart if name in bounds.lists}
        self._text = text
        self._field = ""
        self._bound = bounds.other
        self._begin = 0
        self._count = self._total = self._depth = 0
        self._long: dict[str, slice] = {}
        self._has_strings = False
        self._num_keys = 0

    def run(self) -> dict[str, slice]:
        text, position, size = self._text, 0, len(self._text)
        memo: dict[bytes, tuple[int, int]] = {}
        key, strings_left = b"", MAX_STRINGS
        while True:
            quote = text.find(b'"', position)
            end = size if quote < 0 else quote
            if self._depth == 1 and key and text[position : position + _SHORT].lstrip().startswith(b":"):
                self._begin_field(key, position)
            if end - position <= _SHORT:
                between = text[position:end]
                known = memo.get(between)
                if known is None:
                    known = _structure(between)
                    if len(memo) < 1000:
                        memo[between] = known
                self._add(*known, end)
            else:
                self._walk(position, end)
            if quote < 0:
                self._end_field(size, text.rfind(b"}"))
                return self._long
            strings_left -= 1
            if strings_left < 0:
                self._refuse(f"must be in a body of at most {MAX_STRINGS} strings, keys included")
            if self._depth != 1:
                self._note_string()
                key = b""
                position = self._string_end(quote)
                continue
            position = self._string_end(quote)
            is_key = text[position : position + _SHORT].lstrip().startswith(b":")
            key = text[quote + 1 : position - 1] if is_key else b""
            if is_key:
                self._end_field(quote, text.rfind(b",", 0, quote))
            else:
                self._note_string()

    def _note_string(self) -> None:
        """The field is no list of numbers."""
        if not self._has_strings:
            self._has_strings = True
            self._bound = self._bounds.fields.get(self._field, self._bounds.other)

    def _walk(self, begin: int, end: int) -> None:
        """A long stretch without strings, piece by piece."""
        text = self._text
        for start in range(begin, end, _PIECE):
            piece = text[start : min(end, start + _PIECE)]
            for place in range(0, len(piece) - MAX_DIGITS + 1, MAX_DIGITS):
                if piece[place : place + MAX_DIGITS].isdigit():
                    self._refuse(f"numbers must have at most {MAX_DIGITS} digits")
            self._add(*_structure(piece), start + len(piece))

    def _add(self, values: int, deeper: int, position: int) -> None:
        self._count += values
        self._total += values
        self._depth += deeper
        bound = self._bound
        assert bound.count is not None, "each has a count"
        assert bound.size is not None, "each has a size"
        if self._count > bound.count:
            self._refuse(f"must have at most {bound.count} values{bound.source}, not {self._count} or more")
        if position - self._begin > bound.size:
            self._refuse(f"must be at most {bound.size} bytes of JSON{bound.source}")
        if self._total > (self._bounds.whole.count or 0):
            self._refuse(f"must be in a body of at most {self._bounds.whole.count} values")

    def _begin_field(self, key: bytes, position: int) -> None:
        self._field = key.decode(errors="replace")
        self._bound = self._lists.get(self._field) or self._bounds.fields.get(self._field, self._bounds.other)
        self._begin, self._count, self._has_strings = position, 0, False
        self._num_keys += 1
        if self._num_keys > MAX_KEYS:
            self._refuse(f"must be one of at most {MAX_KEYS} fields")

    def _end_field(self, position: int, end: int) -> None:
        if self._field and not self._has_strings and end - self._begin > _PIECE:
            start = self._text.find(b":", self._begin) + 1
            self._long[self._field] = slice(start, end)
        self._add(0, 0, position)

    def _string_end(self, quote: int) -> int:
        """The position after the string that begins at `quote`, piece by piece."""
        text, start = self._text, quote + 1
        last = start + min(self._bounds.string, self._bound.size or 0)
        position = start
        while True:
            end = position + _PIECE
            closing = text.find(b'"', position, end)
            if closing >= 0 and text.find(b"\\", position, closing) < 0:
                break
            found = _INSIDE.match(text, position, end)
            closing = position if found is None else found.end()
            if closing >= len(text) or text[closing] == _QUOTE:
                break
            if closing == position:  # a backslash at the end of the text
                return len(text)
            position = closing
            if position > last:
                break
        if closing > last:
            self._refuse(f"must have strings of at most {last - start} bytes of JSON{self._bound.source}")
        return min(closing + 1, len(text))

    def _refuse(self, limit: str) -> NoReturn:
        raise InvalidRequestError(self._field[:100] or "body", "more than is allowed", limit)


def _structure(text: bytes) -> tuple[int, int]:
    """Values that begin there, but for the first of a list or an object; and how much deeper it ends."""
    opened = text.count(b"[") + text.count(b"{")
    return text.count(b",") + opened, opened - text.count(b"]") - text.count(b"}")


# --- JSON in strings ---

MAX_VALUES: Final = 2**16
"""Most values of JSON in a string: parsing more takes longer than a loop may stand still."""


def check_inner(field: str, text: str) -> None:
    """Checks JSON that a string of a message or a body holds. Raises `InvalidRequestError` for too many values."""
    if len(text) <= MAX_VALUES:  # it has fewer
        return
    limit = Bound(count=MAX_VALUES, size=len(text) * 4)
    try:
        JsonBounds({}, limit, limit, string=len(text) * 4).check(text.encode(errors="replace"))
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.value, f"{error.limit}, in its JSON") from None


# --- token ids ---


TokenIds: TypeAlias = list[int] | list[list[int]]

MAX_LISTS: Final = 2048
"""Most lists of token ids in one."""


def token_ids(field: str, text: bytes) -> TokenIds:
    """Of a JSON list of token ids, or of such lists. Raises `InvalidRequestError`."""
    inner = text.strip()
    if not (inner.startswith(b"[") and inner.endswith(b"]")):
        raise _no_ids(field)
    inner = inner[1:-1]
    if b"[" not in inner:
        return _flat(field, inner)
    if inner.count(b"[") > MAX_LISTS:
        raise InvalidRequestError(field, "more", f"must have at most {MAX_LISTS} lists")
    lists = []
    for number, part in enumerate(inner.split(b"[")):
        ids, closing, rest = part.rpartition(b"]")
        is_first, is_separated = number == 0, rest.strip() == b","
        if is_first:
            if part.strip():
                raise _no_ids(field)
            continue
        if not closing or not (is_separated or not rest.strip()):
            raise _no_ids(field)
        lists.append(_flat(field, ids))
    return lists


def _flat(field: str, text: bytes) -> list[int]:
    found: list[int] = []
    start, size = 0, len(text)
    if not text.strip():
        return found
    while start <= size:
        end = text.find(b",", start + _PIECE)
        end = size if end < 0 else end
        found += _piece(field, text[start:end])
        start = end + 1
    return found


def _piece(field: str, text: bytes) -> list[int]:
    try:
        values: list[Any] = json.loads(b"[%b]" % text)
    except (ValueError, RecursionError):
        raise _no_ids(field) from None
    if not values or set(map(type, values)) != {int}:
        raise _no_ids(field)
    return values


def _no_ids(field: str) -> InvalidRequestError:
    return InvalidRequestError(field, "a list", "is not valid: a long list must be of token ids, or of lists of them")
