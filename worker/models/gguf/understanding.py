"""Metadata of a GGUF file by its architecture's keys, with the types that they must have."""

from typing import Any, Final

from holdfast.worker.models.gguf.header import Header

_NEEDED: Final = object()


class NotUnderstood(Exception):
    """The file is not of a form that is read. The message goes on from the file's name."""


class Metadata:
    """The keys `ARCHITECTURE.*`, and which tensors there are."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: Any = _NEEDED) -> int:
        """A whole number above 0, or a list that has it once for each layer. Raises `NotUnderstood`."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]
        if value is _NEEDED:
            raise NotUnderstood(f"lacks the key {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise NotUnderstood(f"has {self.architecture}.{key} = {str(value)[:100]}, and a number above 0 is read")
        return value

    def number(self, key: str, default: Any = _NEEDED) -> float:
        """A number above 0. Raises `NotUnderstood`."""
        value = self.get(key, default)
        if value is _NEEDED:
            raise NotUnderstood(f"lacks the key {self.architecture}.{key}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise NotUnderstood(f"has {self.architecture}.{key} = {str(value)[:100]}, and a number above 0 is read")
        return float(value)

    @property
    def num_layers(self) -> int:
        """Raises `NotUnderstood` for more of them than there are tensors."""
        count, most = self.count("block_count"), len(self.header.tensors)
        if count > most:
            raise NotUnderstood(f"has {self.architecture}.block_count = {count}, and {most} tensors")
        return count

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.header.tensors
