"""Codes that are made while a plain checkpoint is loaded (`quantizing_tensors.py`): of a small model once, since the
proof at load reads its weights several times; of a large one, of which the proof reads few layers, as rows are packed.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.proof import MAX_REFERENCE_NUMBERS, num_numbers


def made_if_small(layout: DecoderLayout) -> DecoderLayout:
    """The layout, with all codes in memory if the reference runs the whole model. Raises `NotFiniteError`."""
    return _made(layout) if num_numbers(layout) <= MAX_REFERENCE_NUMBERS else layout


def _made(part: Any) -> Any:
    if isinstance(part, StoredMatrix):
        return part.with_codes()
    if isinstance(part, tuple):
        made = tuple(_made(item) for item in part)
        return part if all(one is other for one, other in zip(made, part, strict=True)) else made
    if not is_dataclass(part) or isinstance(part, type):
        return part
    old = {field.name: getattr(part, field.name) for field in fields(part)}
    new = {name: _made(value) for name, value in old.items()}
    return part if all(new[name] is value for name, value in old.items()) else replace(part, **new)
