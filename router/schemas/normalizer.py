"""JSON schema normalizer: converts a client's schema to one that llguidance enforces as it is.

Each keyword has its row in `_KEYWORDS`: keywords that llguidance enforces in another form are rewritten, keywords
without effect are dropped, and the others are refused by `SchemaError`, which names the place. Every API uses it, for
`structured_outputs.json` and for the parameters of tools.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from holdfast.router.schemas.numbers import LOWER, UPPER, check_exact, normalize_bounds
from holdfast.router.schemas.patterns import normalize_object, normalize_strings
from holdfast.router.schemas.places import References, SchemaError, children
from holdfast.router.schemas.satisfiability import Disjointness, FiniteValues, types_of

_TYPES: Final = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_NUMERIC: Final = frozenset({*LOWER, *UPPER, "multipleOf"})
_MOST: Final = 2**31 - 1
"""More characters, elements or properties than any output has."""
_SPELLED: Final = frozenset("\b\f\n\r\t")
"""Control characters that JSON has an escape of two characters for."""

_DRAFTS: Final = frozenset(
    {f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)}
    | {f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")}
)

_OLD_DRAFTS: Final = "http://json-schema.org/draft-0"

Keyword = Callable[["_Node", Any], None]


@dataclass(frozen=True, slots=True)
class NormalizedSchema:
    """Schema in the form that llguidance is given."""

    schema: Mapping[str, Any]
    escapes: str
    """The characters that may follow a backslash in a JSON string, as `json_allowed_escapes` takes them."""


def normalized(schema: Any) -> NormalizedSchema:
    """The schema as llguidance enforces it. `schema` is any JSON value; it is not changed.

    Raises `SchemaError` for a schema that is invalid, or cannot be enforced.
    """
    try:
        return _normalized(copy.deepcopy(schema))
    except RecursionError:
        raise SchemaError("", None, "is nested too deeply") from None


def normalized_text(text: str) -> NormalizedSchema:
    """Like `normalized`, for a schema's JSON text. Raises ValueError for text that is no JSON."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise SchemaError("", None, "is nested too deeply") from None
    return normalized(schema)


def _normalized(root: Any) -> NormalizedSchema:
    if root is True:
        root = {}
    if not isinstance(root, dict):
        limit = "matches nothing" if root is False else "must be a JSON schema: an object, true or false"
        raise SchemaError("", root, limit)
    root.pop("x-guidance", None)  # options of llguidance, which are ours to set
    if str(root.get("$schema", "")).removesuffix("#") not in _DRAFTS:
        root.pop("$schema", None)  # its keywords are taken for those of the latest draft
    if str(root.get("$schema", "")).startswith(_OLD_DRAFTS):
        _drop_siblings_of_references(root)
    references = References(root)
    finite = FiniteValues(root, references)
    if root not in finite:
        limit = "no finite value matches: it matches nothing, or contains itself"
        raise SchemaError(finite.culprit(root), None, limit)
    _Walk(references, finite).visit(root, "")
    return NormalizedSchema(MappingProxyType(root), _escapes(root))


def _drop_siblings_of_references(node: Any) -> None:
    """Up to draft 7 they say nothing."""
    if isinstance(node, dict) and isinstance(node.get("$ref"), str):
        for keyword in node.keys() - {"$ref", "$schema", "definitions", "$defs"}:
            del node[keyword]
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _drop_siblings_of_references(item)


class _Walk:
    """Normalizes each schema that is applied, once, in place."""

    def __init__(self, references: References, finite: FiniteValues) -> None:
        self.references = references
        self.disjointness = Disjointness(references)
        self._finite = finite
        self._seen: set[int] = set()

    def visit(self, schema: Any, path: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SchemaError(path, schema, "must be a schema: an object, true or false")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        node = _Node(schema, path, self)
        _check_types(node)
        for keyword in list(schema):
            if keyword in _KEYWORDS and keyword in schema:
                _KEYWORDS[keyword](node, schema[keyword])
        if "$ref" in schema:
            if path and "$id" in schema:
                raise node.refuse("$id", "cannot be enforced beside $ref: JSON Schema drafts differ on its meaning")
            self.visit(node.target(), f"{path}.$ref")
        for child in list(children(schema, path)):
            if child.schema not in self._finite:
                child.holder[child.key] = False
            self.visit(child.schema, child.path)
        if not _NUMERIC.isdisjoint(schema):
            normalize_bounds(schema, path)
        normalize_strings(schema, path)
        normalize_object(schema, path)
        if "oneOf" in schema:
            _as_any_of(node)


@dataclass(frozen=True, slots=True)
class _Node:
    """A schema on the way."""

    schema: dict[str, Any]
    path: str
    walk: _Walk

    def refuse(self, keyword: str, limit: str) -> SchemaError:
        return SchemaError(f"{self.path}.{keyword}", self.schema.get(keyword), limit)

    def target(self) -> Any:
        try:
            return self.walk.references.target(self.schema)
        except (LookupError, ValueError, TypeError):
            limit = "points to nothing in the schema; other documents are not loaded"
            raise self.refuse("$ref", f"{self.schema['$ref']!r} {limit}") from None


def _check_types(node: _Node) -> None:
    for name in types_of(node.schema):
        if name not in _TYPES:
            raise node.refuse("type", f"must be of {', '.join(sorted(_TYPES))}")
    if "type" in node.schema and not types_of(node.schema):
        raise node.refuse("type", "must be a type, or a list of types")


# --- rows of the table ---


def _count(keyword: str) -> Keyword:
    """A whole number of at least 0, also written as a decimal: 1.0. A bound that no output reaches is dropped."""

    def normalize(node: _Node, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < 0 or value != value // 1:
            raise node.refuse(keyword, "must be a whole number of at least 0")
        node.schema[keyword] = int(value)
        if value > _MOST and keyword.startswith("max"):
            del node.schema[keyword]
        elif value > _MOST:
            raise node.refuse(keyword, f"cannot be enforced: no output has more than {_MOST}")

    return normalize


def _schemas(keyword: str) -> Keyword:
    """A list of schemas that is not empty."""

    def check(node: _Node, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise node.refuse(keyword, "must be a list of one or more schemas")

    return check


def _schema(keyword: str, *others: type) -> Keyword:
    """A schema, or one of `others`."""

    def check(node: _Node, value: Any) -> None:
        if not isinstance(value, (dict, bool, *others)):
            raise node.refuse(keyword, "must be a schema: an object, true or false")

    return check


def _members(keyword: str) -> Keyword:
    """An object of schemas."""

    def check(node: _Node, value: Any) -> None:
        if not isinstance(value, dict):
            raise node.refuse(keyword, "must be an object of schemas")

    return check


def _only(keyword: str, *empty: Any) -> Keyword:
    """Handler of a keyword that is enforced only in the values that demand nothing, and is then dropped."""

    def check(node: _Node, value: Any) -> None:
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in empty):
            raise node.refuse(keyword, "cannot be enforced")
        del node.schema[keyword]

    return check


def _enum(node: _Node, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise node.refuse("enum", "must be a list of one or more values")
    check_exact(value, f"{node.path}.enum")


def _const(node: _Node, value: Any) -> None:
    check_exact(value, f"{node.path}.const")


def _required(node: _Node, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise node.refuse("required", "must be a list of names")


def _unique_items(node: _Node, value: Any) -> None:
    """Drops the keyword if there is at most one item, which is always unique."""
    most = node.schema.get("maxItems")
    has_one = isinstance(most, int | float) and most <= 1
    if value is not False and not has_one and "array" in types_of(node.schema):
        raise node.refuse("uniqueItems", "cannot be enforced")
    del node.schema["uniqueItems"]


def _contains(node: _Node, value: Any) -> None:
    """Drops the keyword if it demands nothing: none need match, and any number may."""
    if "array" in types_of(node.schema) and (node.schema.get("minContains", 1) > 0 or "maxContains" in node.schema):
        raise node.refuse("contains", "cannot be enforced")
    del node.schema["contains"]


def _contains_count(keyword: str) -> Keyword:
    def drop(node: _Node, value: Any) -> None:
        """Drops the keyword: it has no effect without `contains`."""
        if "contains" not in node.schema:
            del node.schema[keyword]

    return drop


def _if(node: _Node, value: Any) -> None:
    if "then" in node.schema or "else" in node.schema:
        raise node.refuse("if", "cannot be enforced")
    del node.schema["if"]


def _branch(keyword: str) -> Keyword:
    def drop(node: _Node, value: Any) -> None:
        """Drops the keyword: it has no effect without `if`."""
        if "if" not in node.schema:
            del node.schema[keyword]

    return drop


def _not(node: _Node, value: Any) -> None:
    if value is not False and value != {"not": {}} and value != {"not": True}:
        raise node.refuse("not", "cannot be enforced")
    del node.schema["not"]


def _property_names(node: _Node, value: Any) -> None:
    """Names are texts."""
    if "object" in types_of(node.schema) and value not in ({}, {"type": "string"}) and value is not True:
        raise node.refuse("propertyNames", "cannot be enforced; patternProperties with additionalProperties false can")
    del node.schema["propertyNames"]


def _unevaluated(keyword: str, plain: str, type_name: str) -> Keyword:
    """Handler that replaces the keyword by the plain one if nothing else evaluates."""
    check = _schema(keyword)
    applicators = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "contains", "$dynamicRef"}

    def normalize(node: _Node, value: Any) -> None:
        check(node, value)
        if plain in node.schema and keyword == "unevaluatedProperties":
            value = True  # every property is evaluated
        if value is True or value == {} or type_name not in types_of(node.schema):
            del node.schema[keyword]
            return
        if applicators & node.schema.keys() or plain in node.schema:
            raise node.refuse(keyword, f"cannot be enforced beside other schemas of the {type_name}")
        node.schema[plain] = node.schema.pop(keyword)

    return normalize


_KEYWORDS: Final[Mapping[str, Keyword]] = MappingProxyType(
    {
        # counts
        **{
            keyword: _count(keyword)
            for keyword in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
        },
        # combinations
        **{keyword: _schemas(keyword) for keyword in ("allOf", "anyOf", "oneOf")},
        "not": _not,
        "if": _if,
        "then": _branch("then"),
        "else": _branch("else"),
        # values
        "const": _const,
        "enum": _enum,
        # objects
        "properties": _members("properties"),
        "patternProperties": _members("patternProperties"),
        "additionalProperties": _schema("additionalProperties"),
        "required": _required,
        "propertyNames": _property_names,
        "dependentRequired": _only("dependentRequired", {}),
        "dependentSchemas": _only("dependentSchemas", {}),
        "dependencies": _only("dependencies", {}),
        "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties", "object"),
        # arrays
        "items": _schema("items", list),
        "uniqueItems": _unique_items,
        "contains": _contains,
        "minContains": _contains_count("minContains"),
        "maxContains": _contains_count("maxContains"),
        "unevaluatedItems": _unevaluated("unevaluatedItems", "items", "array"),
        # references that depend on where they are read from
        "$dynamicRef": _only("$dynamicRef"),
        "$recursiveRef": _only("$recursiveRef"),
    }
)
"""Handlers by keyword. Other keywords are enforced by llguidance unchanged (`type`, `prefixItems`) or by the passes of
`_Walk.visit` (bounds, strings, objects), or are annotations."""


def _as_any_of(node: _Node) -> None:
    """Turns disjoint branches into `anyOf`: a value that matches any of them matches one. Raises `SchemaError` if they
    may overlap.
    """
    schema = node.schema
    branches = schema.pop("oneOf")
    overlap = node.walk.disjointness.first_overlap(branches, schema)
    if overlap is not None:
        schema["oneOf"] = branches
        first, second = overlap
        limit = f"cannot be enforced: branches {first} and {second} may match the same value; anyOf can be enforced"
        raise node.refuse("oneOf", limit)
    if "anyOf" in schema:
        schema.setdefault("allOf", []).append({"anyOf": branches})
    else:
        schema["anyOf"] = branches


def _escapes(root: Any) -> str:
    """Escapes of `\\u`, no more than needed: a name spelled with it could be a declared one a second time.

    Raises `SchemaError` where a constant can only be written with it, and an object has names besides those declared.
    """
    has_controls, has_open_objects = False, False
    open_nodes = [root]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict):
            is_open = node.get("additionalProperties", True) is not False or "patternProperties" in node
            has_open_objects |= is_open and bool(node.get("properties") or node.get("required"))
            open_nodes += [*node, *node.values()]
        elif isinstance(node, list):
            open_nodes += node
        elif isinstance(node, str):
            has_controls |= any((char < " " or char == "\x7f") and char not in _SPELLED for char in node)
    if has_controls and has_open_objects:
        limit = (
            "has a control character in a text of const, enum or properties, which cannot be enforced beside objects "
            "with properties or required whose additionalProperties is not false"
        )
        raise SchemaError("", None, limit)
    return 'nrbtf\\"u' if has_controls else 'nrbtf\\"'
