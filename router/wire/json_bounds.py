"""Static bounds of JSON text: a scan of its bytes, field by field, before a parser builds anything.

As with protobuf (`worker/wire/message_bounds.py`), the scan stops at the first field beyond its bound, so that its cost
is limited by the bounds. Parsers hold Python's lock to their end, and a list of numbers costs them a hundred times its
bytes: so token ids are read apart, in pieces, and so are long lists of objects.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NoReturn, TypeAlias

from pydantic_core import from_json

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.wire.bound import Bound

MAX_STRINGS: Final = 2**16
"""Most strings of one text, keys included."""

MAX_KEYS: Final = 1024
"""Most fields of its object."""

MAX_DIGITS: Final = 64
"""A number with twice the allowed digits is refused; with fewer it is accepted."""

_QUOTE, _COMMA = ord('"'), ord(",")
_ELEMENTS: Final = 2
"""Depth of the elements of a field's list."""
_PART: Final = 2**15
"""Bytes of elements that are parsed at one go, and those of one element more."""
_PIECE: Final = 2**16
"""Bytes that are looked at, or parsed, at one go."""

_SHORT: Final = 16  # bytes
_INSIDE: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Bounds of the fields of one sort of JSON object, by name. They count values: what commas and brackets part."""

    fields: Mapping[str, Bound]
    other: Bound
    """Bound of each field without an entry."""
    whole: Bound
    """Bound of all fields together."""
    string: int
    """Bytes of the longest string, as JSON writes it."""
    lists: Mapping[str, Bound] = field(default_factory=dict)
    """Wider ones of fields that hold lists of numbers, for callers that read these apart (`token_ids`)."""

    def check(self, text: bytes, apart: Collection[str] = ()) -> dict[str, slice]:
        """Positions of the values of long fields without strings, by name. Those of `apart` are read apart.

        Raises `InvalidRequestError`, naming the first field beyond its bound.
        """
        return _Scan(self, text, apart).run()

    def take_apart(
        self, text: bytes, names: Collection[str], objects: Collection[str] = ()
    ) -> tuple[bytes, dict[str, list[Any]]]:
        """The text without its long strings, and these by field.

        Of lists of token ids in the fields `names` the text has an empty list then; of lists of objects in the fields
        `objects`, a list of an empty one. A value that is not a list of objects is passed on unchanged.

        Raises `InvalidRequestError` as `check` does, and for a value that is not a list of token ids.
        """
        scan = _Scan(self, text, names, objects)
        long = scan.run()
        lists: dict[str, list[Any]] = {name: token_ids(name, text[long[name]]) for name in names if name in long}
        for name, place in scan.parts.items():
            found = _objects(text, place)
            if found is not None:
                lists[name], long[name] = found, slice(place[0], place[-1])
        for name in sorted(lists, key=lambda one: -int(long[one].start)):
            left = b"[{}]" if name in scan.parts else b"[]"
            text = b"%b%b%b" % (text[: long[name].start], left, text[long[name].stop :])
        return text, lists


class _Scan:
    """One text."""

    def __init__(self, bounds: JsonBounds, text: bytes, apart: Collection[str], objects: Collection[str] = ()) -> None:
        self.parts: dict[str, list[int]] = {}
        """Positions for each long field of `objects`: where its value begins, commas between its elements, and where it
        ends."""
        self._objects = objects
        self._cuts: list[int] | None = None
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
        memo: dict[bytes, tuple[int, int, int, int]] = {}
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
                    known = *_structure(between), *_comma(between)
                    if len(memo) < 1000:
                        memo[between] = known
                values, deeper, offset, depth = known
                if self._cuts is not None and self._depth + depth == _ELEMENTS and end - self._cuts[-1] > _PART:
                    self._cuts.append(position + offset)
                self._add(values, deeper, end)
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
        self._cuts = [position] if self._field in self._objects else None
        self._num_keys += 1
        if self._num_keys > MAX_KEYS:
            self._refuse(f"must be one of at most {MAX_KEYS} fields")

    def _end_field(self, position: int, end: int) -> None:
        if self._field and not self._has_strings and end - self._begin > _PIECE:
            start = self._text.find(b":", self._begin) + 1
            self._long[self._field] = slice(start, end)
        self.parts.pop(self._field, None)  # of two fields of one name the last one counts
        if self._field and self._cuts is not None and len(self._cuts) > 1:
            start = self._text.find(b":", self._begin) + 1
            self.parts[self._field] = [start, *self._cuts[1:], end]
        self._cuts = None
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


def _comma(text: bytes) -> tuple[int, int]:
    """The first of the least deep commas, and its depth; (-1, -1000) for none."""
    place, least, depth = -1, 1000, 0
    for index, byte in enumerate(text):
        if byte in b"[{":
            depth += 1
        elif byte in b"]}":
            depth -= 1
        elif byte == _COMMA and depth < least:
            place, least = index, depth
    return (place, least) if place >= 0 else (-1, -1000)


def _objects(text: bytes, place: Sequence[int]) -> list[dict[str, Any]] | None:
    """The objects of a JSON list, parsed part by part; None where it is no list of objects, or no JSON."""
    whole = text[place[0] : place[-1]]
    if not (whole.lstrip()[:1] == b"[" and whole.rstrip()[-1:] == b"]"):
        return None
    begin = place[0] + whole.index(b"[")
    end = place[0] + whole.rindex(b"]")
    found: list[dict[str, Any]] = []
    for start, stop in pairwise((begin, *place[1:-1], end)):
        try:
            part = from_json(b"[%b]" % text[start + 1 : stop])
        except ValueError:
            return None
        if not part or set(map(type, part)) != {dict}:
            return None
        found += part
    return found


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
    """Token ids of a JSON list of ids, or of such lists. Raises `InvalidRequestError`."""
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
