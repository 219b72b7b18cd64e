"""Lark writer: rules of a grammar in llguidance's dialect, with the pieces that grammars of tool calls are made of.

A text that is a single token of the tokenizer, special or not, is written as that token: llguidance matches none that
looks like a marker by its text. What may not live here: formats.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from holdfast.router.schemas.normalizer import normalized

_JSON_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""As models were taught to write JSON: with one space or none. Any number lets a model emit blanks without end."""


class LarkRules:
    """Rules in the order in which they were added; the grammar begins at `start`."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if token_ids else None
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """Returns the name."""
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        pieces = self._tokens.split(text) if self._tokens else [text]
        written = [self._token(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece]
        return " ".join(written) or '""'

    def free_text(self, name: str, end: str, banned: str = "") -> str:
        """A rule for any text up to the first `end`, which is part of it, and without `banned`. Returns its name."""
        token = self._token(end)
        terminal = self.add(name.upper(), f"/(?s:.*){'' if token else _escaped(end)}/{_without(banned)}")
        return self.add(name, f"{terminal} {token}") if token else self._lazy(name, terminal)

    def any_text(self, terminal: str, banned: str = "", *, not_first: str = "") -> str:
        """A terminal for any text without `banned`, or with one character at its start. Returns its name."""
        any_but = f"\\s*([^\\s{_escaped(not_first)}](?s:.*))?" if not_first else "(?s:.*)"
        return self.add(terminal, f"/{any_but}/{_without(banned)}")

    def bounded_text(self, name: str, end: str, lengths: str) -> str:
        """A rule for a text of so many characters, as in `*` or `{1,3}`, up to the first `end`. Returns its name."""
        terminal = name.upper()
        mark = end.strip()
        self.add(terminal, f"/(?s:.{lengths}){_escaped(end)}/ & ~/(?s:.*){_escaped(mark)}(?s:.)+/")
        return self._lazy(name, terminal)

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        """A rule for a value that matches a JSON schema. Returns its name. Its escapes mean the same in Python.

        Raises `SchemaError` for a schema that cannot be enforced.
        """
        found = normalized(dict(schema))
        style = {**_JSON_STYLE, "json_allowed_escapes": found.escapes}
        return self.add(name, f"%json {json.dumps({**found.schema, 'x-guidance': style}, ensure_ascii=False)}")

    def written(self) -> str:
        return "\n".join(self._rules) + "\n"

    def _lazy(self, name: str, terminal: str) -> str:
        """A rule that ends where the terminal matches for the first time."""
        self.add(f"{name}[lazy]", terminal)
        return name

    def _token(self, text: str) -> str:
        return f"<[{self._token_ids[text]}]>" if text in self._token_ids else ""


def _escaped(text: str) -> str:
    """As a regex between slashes."""
    return re.escape(text).replace("\n", "n").replace("/", "\\/")


def _without(banned: str) -> str:
    return f" & ~/(?s:.*){_escaped(banned)}(?s:.*)/" if banned else ""
