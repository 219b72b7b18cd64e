"""Tensors of the Open Inference Protocol: their elements as plain values, read from and written in both forms.

A request holds its tensors in the typed form (`contents`, one field for each sort of element) or in the raw one
(`raw_input_contents`, bytes for each tensor), and is answered in the form it came in.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.foreign import grpc_service_pb2
from holdfast.worker.errors import InvalidRequestError

Value = bytes | bool | int | float


@dataclass(frozen=True, slots=True)
class Datatype:
    """One sort of element."""

    name: str
    contents: str
    """The field of the typed form."""
    number: struct.Struct | None
    """The raw form of an element, little-endian; None: a length and that many bytes."""


BYTES: Final = Datatype("BYTES", "bytes_contents", None)
BOOL: Final = Datatype("BOOL", "bool_contents", struct.Struct("<?"))
UINT32: Final = Datatype("UINT32", "uint_contents", struct.Struct("<I"))
FP32: Final = Datatype("FP32", "fp32_contents", struct.Struct("<f"))

_LENGTH: Final = struct.Struct("<I")
_SHARED: Final = "shared_memory_region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor of an answer: a row of elements."""

    name: str
    datatype: Datatype
    values: Sequence[Value]


def input_values(
    message: grpc_service_pb2.ModelInferRequest, datatypes: Mapping[str, Datatype]
) -> dict[str, Sequence[Value]]:
    """The elements of each input, by name. Raises `InvalidRequestError` for a type that is not in `datatypes`."""
    num_raw = len(message.raw_input_contents)
    if num_raw not in (0, len(message.inputs)):
        limit = f"must have one per input, {len(message.inputs)}, or none"
        raise InvalidRequestError("raw_input_contents", num_raw, limit)
    found: dict[str, Sequence[Value]] = {}
    for index, tensor in enumerate(message.inputs):
        if tensor.name in found:
            raise InvalidRequestError(f"inputs[{index}].name", tensor.name, "must not come twice")
        datatype = _datatype(tensor, index, datatypes)
        raw = message.raw_input_contents[index] if num_raw else None
        found[tensor.name] = _values(tensor, datatype, raw)
    return found


def add_outputs(message: grpc_service_pb2.ModelInferResponse, tensors: Sequence[Tensor], *, are_raw: bool) -> None:
    """Adds tensors to an answer, in one of the forms."""
    for tensor in tensors:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype.name, shape=[len(tensor.values)])
        if are_raw:
            message.raw_output_contents.append(_packed(tensor.datatype, tensor.values))
        else:
            getattr(output.contents, tensor.datatype.contents).extend(tensor.values)


def _datatype(tensor: Any, index: int, datatypes: Mapping[str, Datatype]) -> Datatype:
    datatype = datatypes.get(tensor.name)
    if datatype is None:
        raise InvalidRequestError(f"inputs[{index}].name", tensor.name, f"must be one of {', '.join(datatypes)}")
    if _SHARED in tensor.parameters:
        raise InvalidRequestError(tensor.name, _SHARED, "must be in the message: there is no shared memory here")
    if tensor.datatype != datatype.name:
        raise InvalidRequestError(f"{tensor.name}.datatype", tensor.datatype, f"must be {datatype.name}")
    return datatype


def _values(tensor: Any, datatype: Datatype, raw: bytes | None) -> Sequence[Value]:
    has_contents = tensor.HasField("contents")
    if raw is not None and has_contents:
        raise InvalidRequestError(f"{tensor.name}.contents", "set", "must not be set with raw_input_contents")
    typed = getattr(tensor.contents, datatype.contents)
    values = tuple(typed) if raw is None else _unpacked(tensor.name, datatype, raw)
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) != len(values):
        limit = f"must be that of the {len(values)} {datatype.name} elements that came with it"
        raise InvalidRequestError(f"{tensor.name}.shape", shape, limit)
    return values


def _packed(datatype: Datatype, values: Sequence[Any]) -> bytes:
    if datatype.number is not None:
        return b"".join(map(datatype.number.pack, values))
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def _unpacked(name: str, datatype: Datatype, raw: bytes) -> tuple[Value, ...]:
    try:
        if datatype.number is not None:
            return tuple(value for (value,) in datatype.number.iter_unpack(raw))
        return tuple(_texts(raw))
    except struct.error:
        form = (
            "elements that are each a length of four bytes and that many bytes"
            if datatype.number is None
            else "whole elements"
        )
        limit = f"must hold {form}, not {len(raw)} bytes that end in the middle of one"
        raise InvalidRequestError(f"{name}.raw_input_contents", raw[:40], limit) from None


def _texts(raw: bytes) -> list[bytes]:
    """Raises `struct.error` where the last element is cut."""
    texts, position = [], 0
    while position < len(raw):
        (length,) = _LENGTH.unpack_from(raw, position)
        start, position = position + _LENGTH.size, position + _LENGTH.size + length
        if position > len(raw):
            raise struct.error
        texts.append(raw[start:position])
    return texts
