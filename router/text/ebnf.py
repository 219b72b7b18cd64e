"""EBNF as XGrammar, vLLM and llama.cpp (GBNF) write it, rewritten in llguidance's Lark.

    root ::= "yes" | answer{1,3}   # begins at root
    answer ::= [a-z]+ "."

A rule ends where the next one begins, whatever the line breaks. Rules without recursion become terminals, which match
exactly; between the others llguidance takes the longest text that fits.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Final

from holdfast.router.text.grammar_rules import Piece, check_finite, derivable

_START: Final = re.compile(r"\s*(?:#[^\n]*\n\s*)*[\w-]+[ \t]*::=")
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<head>[\w-]+\s*::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<set>\[\^?(?:\\.|[^\]\\])*\])
    |(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^xuU]))", re.DOTALL)
_CONTROLS: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_MAX_COUNT: Final = 10_000  # repetitions


def is_ebnf(grammar: str) -> bool:
    """Whether the first rule is written `name ::=`, which no Lark is."""
    return _START.match(grammar) is not None


def ebnf_as_lark(grammar: str) -> str:
    """Raises ValueError, naming line and rule, for text that is not EBNF."""
    rules = _rules(grammar)
    if "root" not in rules:
        raise ValueError("an EBNF grammar (::=) must define root; Lark rules are written with a colon")
    for name, pieces in rules.items():
        unknown = [piece.text for piece in pieces if piece.kind == "name" and piece.text not in rules]
        if unknown:
            raise ValueError(f"{name} refers to {unknown[0]}, which is not defined")
    check_finite(rules)
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}_{index}" for index, name in enumerate(rules)}
    lines = [f"{names[name]}: {_body(pieces, names)}" for name, pieces in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines]) + "\n"


def _rules(grammar: str) -> dict[str, list[Piece]]:
    rules: dict[str, list[Piece]] = {}
    pieces: list[Piece] | None = None
    for piece, position in _pieces(grammar):
        if piece.kind == "head":
            name = piece.text.removesuffix("::=").strip()
            if name in rules:
                raise ValueError(f"{_line(grammar, position)}: {name} is defined twice")
            pieces = rules[name] = []
        elif pieces is None:
            raise ValueError(f"{_line(grammar, position)}: a rule must begin with its name and ::=")
        else:
            pieces.append(piece)
    return rules


def _pieces(grammar: str) -> Iterator[tuple[Piece, int]]:
    """Pieces that are no space, each with its position."""
    position = 0
    while position < len(grammar):
        found = _TOKEN.match(grammar, position)
        if found is None or found.lastgroup is None:
            raise ValueError(f"{_line(grammar, position)}: {grammar[position : position + 20]!r} is not EBNF")
        if found.lastgroup != "space":
            yield Piece(found.lastgroup, found[0]), position
        position = found.end()


def _line(grammar: str, position: int) -> str:
    return f"line {grammar.count(chr(10), 0, position) + 1}"


def _terminals(rules: Mapping[str, list[Piece]]) -> Set[Hashable]:
    """The rules that refer neither to themselves nor to a recursive rule."""
    return derivable((name, [piece.text for piece in pieces if piece.kind == "name"]) for name, pieces in rules.items())


def _body(pieces: list[Piece], names: Mapping[str, str]) -> str:
    return _alternatives(_written(piece, names) for piece in pieces)


def _alternatives(written: Iterator[str]) -> str:
    """An alternative without anything in it is the empty text."""
    out: list[str] = []
    is_empty = True
    for text in written:
        if text in ("|", ")") and is_empty:
            out.append('""')
        out.append(text)
        is_empty = text in ("|", "(")
    return " ".join([*out, '""'] if is_empty else out).replace(" {", "{")


def _written(piece: Piece, names: Mapping[str, str]) -> str:
    match piece.kind:
        case "name":
            return names[piece.text]
        case "text":
            return json.dumps("".join(_characters(piece.text[1:-1])), ensure_ascii=False)
        case "set":
            return _set(piece.text[1:-1])
        case "count":
            return _count(piece.text)
        case _:
            return "/(?s:.)/" if piece.text == "." else piece.text


def _count(text: str) -> str:
    counts = [int(number) for number in re.findall(r"\d+", text)]
    if max(counts) > _MAX_COUNT:
        raise ValueError(f"{text}: a count must be at most {_MAX_COUNT}")
    if not counts[-1] and not text.rstrip("} ").endswith(","):
        raise ValueError(f"{text}: the last count must be at least 1")
    if len(counts) == 2 and counts[0] > counts[1]:
        raise ValueError(f"{text}: the first count must not be above the second")
    return re.sub(r"\s", "", text)


def _set(inside: str) -> str:
    is_negated = inside.startswith("^")
    characters, ranges, index = list(_characters(inside.removeprefix("^"), marks_ranges=True)), list[str](), 0
    while index < len(characters):
        first = last = _literal(characters[index])
        if characters[index + 1 : index + 2] == [""] and index + 2 < len(characters):
            last = _literal(characters[index + 2])
            index += 2
        if first > last:
            raise ValueError(f"[{inside}]: the range {first}-{last} is empty")
        ranges.append(f"{_code(first)}-{_code(last)}" if first != last else _code(first))
        index += 1
    if not ranges:
        raise ValueError("[]: a set must not be empty" if not is_negated else "[^]: a set must not be empty")
    return f"/[{'^' if is_negated else ''}{''.join(ranges)}]/"


def _literal(character: str) -> str:
    """A hyphen that stands where no range can is a hyphen."""
    return character or "-"


def _code(character: str) -> str:
    return f"\\u{{{ord(character):X}}}"


def _characters(text: str, *, marks_ranges: bool = False) -> Iterator[str]:
    """Characters with escapes resolved. With `marks_ranges` a hyphen that is not escaped comes as an empty text."""
    position = 0
    while position < len(text):
        if text[position] != "\\":
            yield "" if marks_ranges and text[position] == "-" else text[position]
            position += 1
            continue
        found = _ESCAPE.match(text, position)
        if found is None:
            raise ValueError(f"{text[position : position + 6]!r} is not an escape")
        code = found[1] or found[2] or found[3]
        yield _of_code(code) if code else _CONTROLS.get(found[4], found[4])
        position = found.end()


def _of_code(code: str) -> str:
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise ValueError(f"U+{code} is no character")
    return chr(number)
