"""Access to a GGUF file's metadata by its architecture's keys, with their types checked, and the Hugging Face tensor
that each stored tensor stands for.
"""

from dataclasses import dataclass
from typing import Any, Final

from holdfast.worker.models.formats.gguf_block_names import Turn
from holdfast.worker.models.formats.gguf_header import Header, StoredTensor

_NEEDED: Final = object()


class NotUnderstood(Exception):
    """The file's form is not supported. The message continues after the file's name."""


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
            raise NotUnderstood(f"has {self.architecture}.{key} = {str(value)[:100]}: must be a number above 0")
        return value

    def number(self, key: str, default: Any = _NEEDED) -> float:
        """A number above 0. Raises `NotUnderstood`."""
        value = self.get(key, default)
        if value is _NEEDED:
            raise NotUnderstood(f"lacks the key {self.architecture}.{key}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise NotUnderstood(f"has {self.architecture}.{key} = {str(value)[:100]}: must be a number above 0")
        return float(value)

    def natural(self, key: str) -> int:
        """A whole number from 0 on; 0 where the file has none. Raises `NotUnderstood`."""
        return self.count(key) if self.get(key) else 0

    def of_some_layers(self, key: str) -> int:
        """A whole number above 0, or a list that has it for some layers and 0 for others. Raises `NotUnderstood`."""
        value = self.get(key)
        if not isinstance(value, list):
            return self.count(key)
        found = [one for one in value if one]
        if not found or any(type(one) is not int or one < 0 or one != found[0] for one in found):
            raise NotUnderstood(f"has {self.architecture}.{key} = {str(value)[:100]}: must be one number above 0")
        return int(found[0])

    @property
    def num_own_layers(self) -> int:
        """Layers without those behind them, which draft. Raises `NotUnderstood`."""
        drafting = self.count("nextn_predict_layers", 0) if self.get("nextn_predict_layers") else 0
        return self.num_layers - min(drafting, self.num_layers - 1)

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


def of_pairs(num_rows: int, heads: int) -> Turn:
    """Rows of this many heads, which llama.cpp rotates pair after pair; Hugging Face has the first of all pairs and
    then the second ones.
    """
    return Turn(0, heads, 2, num_rows // heads // 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of a Hugging Face model, or one of the parts of which its rows are, and where a GGUF file has it."""

    name: str
    """Hugging Face's."""
    stored: StoredTensor
    """The shape is [rows, columns], or [rows], as it is read."""
    form: str = "matrix"
    """`matrix`, or how numbers become the tensor: `FORMS` in `gguf_tensors.py`."""
    rows: Turn | None = None
    columns: Turn | None = None
    """None: in the order in which they are stored."""
    first: int = 0
    count: int | None = None
    """Which of the rows, once they are in order; None: all from there on."""
    part: int = 0
    """Number among the parts of a tensor."""
    plus: float = 0.0
    """Value added to its numbers: the norms of some families are stored more by one."""
