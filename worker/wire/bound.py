"""Bound of one field of a message or a body. Apart from `message_bounds.py`, which imports protobuf: an offline start
needs none of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that one message may hold of a field, in all places together."""

    count: int | None = None
    """Elements of a repeated field, entries of a map."""
    size: int | None = None
    """Bytes of texts, of maps with texts, and of their containers."""
    setting: str = ""
    """The setting that it follows from, where there is one."""

    @property
    def source(self) -> str:
        return f" ({self.setting})" if self.setting else ""
