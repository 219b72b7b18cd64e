"""Tensors of a folder's safetensors files by name, each a view of its mapped file: nothing is read until it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.mapped_files import storage_of_file, tensor_in_file
from holdfast.worker.models.safetensors_header import read_header
from holdfast.worker.models.text_model import name_in_model
from holdfast.worker.models.weight_files import weight_files

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a header."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor, and the file that it lies in."""

    values: Tensor
    file: str


def mapped_tensors(folder: Path, others: str | None = None) -> dict[str, MappedTensor]:
    """The tensors of the files that Hugging Face would read, without tensors of other models beside the text model,
    except names that begin with `others`.

    Raises `ConfigurationError` that names tensor and file: it is there twice, of no type that is read, or of a shape
    that does not fit its bytes.
    """
    found: dict[str, MappedTensor] = {}
    named = name_in_model(folder)
    for path in weight_files(folder):
        header, header_bytes = read_header(path)
        storage = storage_of_file(path)
        for stored, entry in header.items():
            name = named(stored)
            if name is None and others is not None and stored.startswith(others):
                name = stored
            if name is None:
                continue
            where = f"{stored} in {path}"
            if name in found:
                raise ConfigurationError(
                    f"{where} is also in {found[name].file}; remove the file that does not belong to the model"
                )
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ConfigurationError(f"{where} is of type {entry['dtype']}, which is not supported")
            shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
            strides = torch.empty(shape, device="meta").stride()
            try:
                values = tensor_in_file(storage, dtype, header_bytes + first, shape, strides)
            except ValueError as error:
                raise ConfigurationError(f"{where}: {error}; fetch it again") from error
            if values.nbytes != end - first:
                raise ConfigurationError(f"{where} has {end - first} bytes, where its shape needs {values.nbytes}")
            found[name] = MappedTensor(values, str(path))
    return found
