"""Header of a GGUF file, or of all parts of a split one: its metadata, and where its tensors lie.

The `gguf` package reads it. It trusts lengths and offsets in the file, so its reads are bounded by the file's end here.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import NDArray

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.formats.gguf_block_names import READ_KINDS

FETCH: Final = "fetch it again"

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)  # of the GGUF format
_MAX_DIMS: Final = 4  # GGML_MAX_DIMS of ggml
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_ALIGNED: Final = 4
"""Bytes that tensors begin at a multiple of: floats are read where they lie."""

_LONGEST: Final = 500
"""Characters of a wrong value that an error shows."""

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a file holds it."""

    name: str
    kind: str
    """Type of its numbers, such as `F32` or `Q4_K`."""
    shape: tuple[int, ...]
    """Shape in torch's order: rows first, inputs last."""
    part: int
    """Which of the files it lies in."""
    offset: int
    """Bytes from the file's beginning."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Metadata and tensors of a GGUF file."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Values by key. Floats of 32 bits are the shortest decimals that mean them, as a config.json would have them."""
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path, given: str) -> Header:
    """The header of the file at `path`; where it is a part of a split one, of all parts. `given` says where it was
    named.

    Raises `ConfigurationError` that names the file, for a file that is truncated, is inconsistent, or has tensors of
    unsupported kinds.
    """
    files = parts_of(path, given)
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        own, found = _read(file, number, given)
        if len(files) > 1 and (own.get("split.no"), own.get("split.count")) != (number, len(files)):
            raise refused(given, file, f"is not part {number + 1} of {len(files)} by its own metadata")
        metadata = metadata or own
        for tensor in found:
            if tensor.name in tensors:
                raise refused(given, file, f"has a tensor {tensor.name}, and so has another part")
            tensors[tensor.name] = tensor
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and expected != len(tensors):
        raise refused(given, files[0], f"says that its parts have {expected} tensors, and they have {len(tensors)}")
    _check_kinds(tensors, given, files[0])
    return Header(files=files, metadata=metadata, tensors=tensors)


def parts_of(path: Path, given: str) -> tuple[Path, ...]:
    """The file itself, or all parts of its split file. Raises `ConfigurationError` for a missing
    file.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    files = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{given}: {file.name}, a part of the split file, is not there; {FETCH}")
    return tuple(files)


def refused(given: str, path: Path, what: str) -> ConfigurationError:
    """Error about a GGUF file; `what` is the problem, in words that follow the file's name."""
    shown = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."  # names are as long as a file has them
    return ConfigurationError(f"{given}: {path.name} {shown}; {FETCH}")


def _read(path: Path, number: int, given: str) -> tuple[dict[str, Any], list[StoredTensor]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(24)
    except OSError as error:
        raise refused(given, path, f"cannot be read ({error.strerror})") from error
    _check_start(path, start, given)
    try:
        reader = _BoundedReader(path)
        metadata = {key: _value(field) for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, struct.error, OverflowError, RecursionError, MemoryError) as error:
        raise refused(given, path, f"has a header that is cut short or wrong ({error})") from error
    return metadata, [_stored(*entry, number, path, size, given) for entry in reader.places]


def _check_start(path: Path, start: bytes, given: str) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise ConfigurationError(f"{given}: {path.name} is a git-lfs pointer; run `git lfs pull` in its folder")
    if len(start) < 24 or not start.startswith(_MAGIC):
        raise refused(
            given, path, "is not a GGUF file: it does not begin with GGUF's magic number" if start else "is empty"
        )
    version = int.from_bytes(start[4:8], "little")
    if version not in _VERSIONS:
        is_swapped = int.from_bytes(start[4:8], "big") in _VERSIONS
        message = "is written for big-endian machines" if is_swapped else f"is of GGUF's version {version}"
        raise ConfigurationError(
            f"{given}: {path.name} {message}; little-endian files of the versions {', '.join(map(str, _VERSIONS))} are "
            "read: convert the model again"
        )


def _stored(
    name: str, dims: tuple[int, ...], kind: int, offset: int, part: int, path: Path, size: int, given: str
) -> StoredTensor:
    shape = tuple(reversed(dims))
    if not 1 <= len(shape) <= _MAX_DIMS or not all(0 < length < 1 << 40 for length in shape):
        raise refused(given, path, f"has a tensor {name} of shape {shape}")
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        return StoredTensor(name=name, kind=f"{kind}", shape=shape, part=part, offset=offset, num_bytes=0)
    values, num_bytes = GGML_QUANT_SIZES[known]
    if values > 1 and len(shape) == 1:
        raise refused(given, path, f"has a vector {name} in {known.name}")
    if shape[-1] % values:
        raise refused(given, path, f"has {name} in {known.name} with {shape[-1]} inputs, no multiple of {values}")
    length = int(np.prod(shape, dtype=object)) // values * num_bytes
    if offset % _ALIGNED:
        raise refused(given, path, f"has {name} at byte {offset}, no multiple of {_ALIGNED}")
    if offset + length > size:
        raise refused(given, path, f"is cut short: {size} bytes are there, and {name} ends at {offset + length}")
    return StoredTensor(name=name, kind=known.name, shape=shape, part=part, offset=offset, num_bytes=length)


def _check_kinds(tensors: Mapping[str, StoredTensor], given: str, path: Path) -> None:
    others = [tensor for tensor in tensors.values() if tensor.kind not in READ_KINDS]
    if others:
        kinds = ", ".join(sorted({tensor.kind for tensor in others})[:8])
        raise ConfigurationError(
            f"{given}: {path.name} has {len(others)} tensors of type {kinds}, such as {others[0].name[:64]}; the "
            f"supported types are {', '.join(READ_KINDS)}: give a file of the model in one of these, as Q4_K_M or Q8_0"
        )


def _value(field: Any) -> Any:
    value = field.contents()
    if field.types[-1:] != [GGUFValueType.FLOAT32]:
        return value
    return [_decimal(one) for one in value] if isinstance(value, list) else _decimal(value)


def _decimal(value: float) -> float:
    """The decimal that was rounded to 32 bits."""
    return float(str(np.float32(value)))


class _BoundedReader(GGUFReader):
    """Reads nothing past the end of the file, and long arrays at once. Tensors are places, whatever their types."""

    _bytes: NDArray[np.uint8] | None = None

    def __init__(self, path: Path) -> None:
        self.places: list[tuple[str, tuple[int, ...], int, int]] = []
        """Name, dimensions in the file's order, number of the type, offset in the file."""
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if self._bytes is None:
            self._bytes = self.data.view(np.ndarray)  # slices of a memmap are slow
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self._bytes):
            raise ValueError(f"it goes on until byte {end}, and {len(self._bytes)} are there")
        return self._bytes[int(offset) : end].view(dtype)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        of_items, first = GGUFValueType(int(kind[0])), orig_offs + 12
        if of_items == GGUFValueType.STRING:
            parts = self._strings(first, int(count[0]))
        elif of_items in self.gguf_scalar_to_np:
            parts = [self._get(first, self.gguf_scalar_to_np[of_items], int(count[0]))]
        else:
            raise ValueError(f"an array of {of_items.name.lower()}s")
        num_bytes = sum(part.nbytes for part in parts) + (8 * len(parts) if of_items == GGUFValueType.STRING else 0)
        places = list(range(2, 2 + len(parts)))
        return 12 + num_bytes, [kind, count, *parts], places, [GGUFValueType.ARRAY, of_items]

    def _strings(self, offset: int, count: int) -> list[NDArray[Any]]:
        assert self._bytes is not None, "the count was read"
        found, content = [], self._bytes.data
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(content, offset)
            found.append(self._get(offset + 8, np.uint8, length))
            offset += 8 + length
        return found

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            self.places.append(
                (str(bytes(name), "utf-8"), tuple(map(int, dims)), int(kind[0]), int(start_offs) + int(offset[0]))
            )
