"""The error of a JSON schema that cannot be enforced: at which keyword, and what can be."""

from typing import Any


class SchemaError(ValueError):
    """`path` leads from the schema's root to the keyword: `.properties.age.minimum`; empty for the root."""

    def __init__(self, path: str, value: Any, limit: str) -> None:
        super().__init__(f"{path.removeprefix('.')}: {limit}" if path else limit)
        self.path = path
        self.value = value
        self.limit = limit

    @property
    def told(self) -> str:
        """As an error of a request says it."""
        return str(self) if "cannot be enforced" in self.limit else f"cannot be enforced: {self}"
