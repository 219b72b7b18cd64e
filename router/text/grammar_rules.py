"""Rules of a grammar as Horn clauses, and which of them no finite text matches: `a ::= "x" a` has no other alternative.

EBNF is judged, and Lark where each of its parts is known here.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_LARK: Final = re.compile(
    r"""(?P<space>\s+|(?://|\#)[^\n]*|\.\.|->\s*[A-Za-z_][\w-]*)
    |(?P<directive>%\w*)
    |(?P<head>[!?]{0,2}[A-Za-z_][\w-]*(?:\[[^\[\]\n]*\])?(?:\.-?\d+)?\s*:)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>)
    |(?P<count>\{\s*(?:\d+\s*)?(?:,\s*(?:\d+\s*)?)?\})
    |(?P<mark>[()\[\]|*+?])
    |(?P<other>[&~@,=:.!<>{}-]|\d+)""",
    re.VERBOSE,
)
_DIRECTIVES: Final = ("%ignore", "%import", "%json", "%lark", "%llguidance", "%regex")
_JSON_FOLLOWS: Final = ("%json", "%llguidance", "%regex")
_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[A-Za-z_][\w-]*")
_NO_TIMES: Final = re.compile(r"\{\s*0*\s*[,}]")


class Piece(NamedTuple):
    """A token of a rule's body."""

    kind: str
    """`name`, `text`, `set`, `count` or `mark`."""
    text: str


@dataclass(slots=True)
class _Group:
    """A rule's body, or parentheses in it."""

    head: Hashable
    needs: list[Hashable] = field(default_factory=list)
    """Needs of the alternative that is being read."""
    ends_in_need: bool = False
    """The last atom is the last need, so that `*` and `?` take it away."""


def derivable(clauses: Iterable[tuple[Hashable, Sequence[Hashable]]]) -> set[Hashable]:
    """The heads of clauses all of whose needs are derivable too. In linear time (Dowling and Gallier, 1984)."""
    users: defaultdict[Hashable, list[int]] = defaultdict(list)
    heads, missing, ready = list[Hashable](), list[int](), list[Hashable]()
    for number, (head, needs) in enumerate(clauses):
        heads.append(head)
        missing.append(len(needs))
        for need in needs:
            users[need].append(number)
        if not needs:
            ready.append(head)
    found: set[Hashable] = set()
    while ready:
        head = ready.pop()
        if head in found:
            continue
        found.add(head)
        for number in users[head]:
            missing[number] -= 1
            if not missing[number]:
                ready.append(heads[number])
    return found


def check_finite(rules: Mapping[str, Sequence[Piece]]) -> None:
    """Raises ValueError for a rule that no finite text matches. Names that are no rules stand for terminals."""
    finite = derivable(clause for name, pieces in rules.items() for clause in _clauses(name, pieces, rules))
    if (endless := next((name for name in rules if name not in finite), None)) is not None:
        raise ValueError(f"{endless} matches no finite text: each of its alternatives needs a rule that does not end")


def lark_rules(grammar: str) -> Mapping[str, Sequence[Piece]]:
    """The rules of a Lark grammar; none where it has parts that are not known here, such as `%lark`.

    Raises ValueError for text that is not Lark, for an unknown directive, and for a directive with invalid JSON.
    """
    rules: dict[str, list[Piece]] = {}
    body: list[Piece] = []
    is_known = True
    for piece, _ in _lark_pieces(grammar):
        named = _NAME.search(piece.text)
        if piece.kind == "head" and named is not None:
            body = rules.setdefault(named[0], [])
        elif piece.kind == "directive" and piece.text.startswith(("%json", "%regex")):
            body.append(Piece("text", piece.text))
        elif piece.kind == "directive":
            body = []  # what follows belongs to no rule
            is_known &= not piece.text.startswith("%lark")
        else:
            body.append(piece)
            is_known &= piece.kind != "other"
    return rules if is_known else {}


def with_schemas(grammar: str, rewritten: Callable[[str], str]) -> str:
    """A Lark grammar whose JSON schemas (`%json`) are rewritten. Raises what `lark_rules` raises."""
    out, position = [], 0
    for piece, start in _lark_pieces(grammar):
        if piece.text.startswith("%json"):
            out += [grammar[position:start], "%json ", rewritten(piece.text.removeprefix("%json"))]
            position = start + len(piece.text)
    return "".join([*out, grammar[position:]])


def _lark_pieces(grammar: str) -> Iterator[tuple[Piece, int]]:
    """Pieces that are no space, each with its position. The text of a directive has its JSON, or its line's rest."""
    position = 0
    while position < len(grammar):
        found = _LARK.match(grammar, position)
        if found is None or found.lastgroup is None:
            line = grammar.count("\n", 0, position) + 1
            raise ValueError(f"line {line}: {grammar[position : position + 20]!r} is not Lark")
        end = _directive_end(grammar, found[0], found.end()) if found.lastgroup == "directive" else found.end()
        if found.lastgroup != "space":
            yield Piece(found.lastgroup, grammar[position:end]), position
        position = end


def _directive_end(grammar: str, name: str, position: int) -> int:
    if name not in _DIRECTIVES:
        raise ValueError(f"{name} is not known here: directives are {', '.join(_DIRECTIVES)}")
    if name == "%import":
        return position + len(grammar[position:].partition("\n")[0])
    if name not in _JSON_FOLLOWS:
        return position
    space = _SPACE.match(grammar, position)
    assert space is not None
    try:
        return json.JSONDecoder().raw_decode(grammar, space.end())[1]
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be followed by JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{name}: the JSON is nested too deeply") from None


def _clauses(
    name: str, pieces: Sequence[Piece], rules: Mapping[str, object]
) -> list[tuple[Hashable, Sequence[Hashable]]]:
    """Clauses under which a rule, and each group in it, is finite: one clause for each alternative."""
    clauses: list[tuple[Hashable, Sequence[Hashable]]] = []
    groups = [_Group(name)]
    for place, piece in enumerate(pieces):
        group = groups[-1]
        if piece.kind in ("name", "text", "set"):
            group.ends_in_need = piece.text in rules and piece.kind == "name"
            group.needs += [piece.text] * group.ends_in_need
        elif piece.text in ("(", "["):
            groups.append(_Group((name, place)))
        elif piece.text == "|":
            clauses.append((group.head, group.needs))
            group.needs, group.ends_in_need = [], False
        elif piece.text in (")", "]") and len(groups) > 1:
            clauses.append((group.head, group.needs))
            del groups[-1]
            groups[-1].ends_in_need = piece.text == ")"
            groups[-1].needs += [group.head] * groups[-1].ends_in_need
        elif (piece.text in ("*", "?") or _NO_TIMES.match(piece.text)) and group.ends_in_need:
            del group.needs[-1]
            group.ends_in_need = False
    return [*clauses, (groups[0].head, groups[0].needs if len(groups) == 1 else [])]
