"""Rules of a grammar as Horn clauses, and which of them no finite text matches: `a ::= "x" a` has no other alternative.

EBNF is judged, and Lark where each of its parts is known here. What may not live here: compilation.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_LARK: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\.\.)
    |(?P<head>[!?]*[A-Za-z_][\w-]*(?:\.-?\d+)?\s*:)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>)
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()\[\]|*+?])""",
    re.VERBOSE,
)
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
    """The rules of a Lark grammar; none where it has parts that are not known here, such as `%json`."""
    rules: dict[str, list[Piece]] = {}
    body: list[Piece] = []
    position = 0
    while position < len(grammar):
        found = _LARK.match(grammar, position)
        if found is None or found.lastgroup is None:
            return {}
        if found.lastgroup == "head":
            named = _NAME.search(found[0])
            assert named is not None
            body = rules.setdefault(named[0], [])
        elif found.lastgroup != "space":
            body.append(Piece(found.lastgroup, found[0]))
        position = found.end()
    return rules


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
