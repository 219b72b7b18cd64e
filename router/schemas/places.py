"""Places in a JSON schema: where subschemas stand, and what references point to."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

_SINGLE: Final = (
    "additionalProperties",
    "items",
    "additionalItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS: Final = ("properties", "patternProperties", "dependentSchemas")


class Child(NamedTuple):
    """A subschema: `holder[key]`."""

    path: str
    holder: Any
    key: Any

    @property
    def schema(self) -> Any:
        return self.holder[self.key]


def children(schema: Mapping[str, Any], path: str = "") -> Iterator[Child]:
    """The subschemas that a schema applies. Definitions are none: a reference applies them."""
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), dict | bool):
            yield Child(f"{path}.{keyword}", schema, keyword)
    for keyword in _LISTS:
        if isinstance(items := schema.get(keyword), list):
            yield from (Child(f"{path}.{keyword}[{index}]", items, index) for index in range(len(items)))
    for keyword in _MAPS:
        if isinstance(members := schema.get(keyword), dict):
            yield from (Child(f"{path}.{keyword}.{name}", members, name) for name in members)


class References:
    """Targets of references in one schema document. Nothing outside of it is looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = _id_of(root)
        self._named: dict[str, Any] = {self._base: root}
        """Schemas by their absolute ids, with anchors as fragments."""
        self._resource_of: dict[int, tuple[str, Any]] = {}
        self._index(root, self._base, root)

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Target of a schema's `$ref`. Raises LookupError if nothing in the document is there."""
        base, resource = self._resource_of.get(id(schema), (self._base, self._root))
        address, fragment = urldefrag(urljoin(base, str(schema["$ref"])))
        if address and address != base:
            resource = self._named[address]
        if not fragment:
            return resource
        if fragment.startswith("/"):
            return _at(resource, fragment)
        return self._named[f"{address}#{fragment}"]

    def _index(self, node: Any, base: str, resource: Any) -> None:
        if isinstance(node, dict):
            own = _id_of(node)
            if node is not self._root and own and not own.startswith("#"):
                base, resource = urldefrag(urljoin(base, own))[0], node
                self._named[base] = node
            if isinstance(anchor := node.get("$anchor"), str):
                self._named[f"{base}#{anchor}"] = node
            if own.startswith("#"):
                self._named[f"{base}{own}"] = node
            self._resource_of[id(node)] = base, resource
        for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            if isinstance(item, dict | list):
                self._index(item, base, resource)


def _id_of(node: Any) -> str:
    found = (node.get("$id") or node.get("id")) if isinstance(node, dict) else ""
    return found.removesuffix("#") if isinstance(found, str) else ""


def _at(node: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        node = node[int(key)] if isinstance(node, list) and key.isdecimal() else node[key]
    return node


class SchemaError(ValueError):
    """`path` leads from the schema's root to the keyword: `.properties.age.minimum`; empty for the root."""

    def __init__(self, path: str, value: Any, limit: str) -> None:
        super().__init__(f"{path.removeprefix('.')}: {limit}" if path else limit)
        self.path = path
        self.value = value
        self.limit = limit

    @property
    def reason(self) -> str:
        """Wording for an error of a request."""
        return str(self) if "cannot be enforced" in self.limit else f"cannot be enforced: {self}"


def list_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """A keyword's list; empty for anything else."""
    found = schema.get(keyword)
    return found if isinstance(found, list) else []
