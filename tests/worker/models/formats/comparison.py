"""Comparison of what is read of a quantized checkpoint with what is read of the folder of its numbers."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.state_layers import GatedDeltaNet
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.stated_layout import read_stated
from tests.fake_group import run_ranks
from tests.worker.executors.cpu.unit_weights import weight_of_units
from tests.worker.models.formats.quantized_folders import Written
from tests.worker.models.layouts import differences, differences_of


def differences_on(written: Written, size: int, dtype: str = "auto") -> list[str]:
    """Between what is read of the quantized folder and of the folder of its numbers."""
    return differences_of(written.folder, written.dequantized, size, dtype)


def differences_between(
    ours: Path, theirs: Path, size: int, arithmetics: Sequence[str] = ("bfloat16", "int8"), **settings: Any
) -> tuple[str | None, list[str]]:
    """Why ranks do not read the second folder, if they do not; and where the first one differs from it in each
    arithmetic. Units and codes are compared by their numbers. The settings are those of both; `quantization` is that
    of the first.
    """
    quantization = settings.pop("quantization", None)

    def compared(group: TensorParallelGroup) -> tuple[str | None, list[str]]:
        expected = read(theirs, group, **settings)
        found = []
        for arithmetic in arithmetics:
            own = read(ours, group, arithmetic, quantization=quantization, **settings)
            if isinstance(own, str) or isinstance(expected, str):
                texts = [one if isinstance(one, str) else "read" for one in (own, expected)]
                found += [] if texts[0] == texts[1] else [" / ".join(texts)]
            else:
                found += [f"{arithmetic}: {place}" for place in differences(own, expected)]
        return expected if isinstance(expected, str) else None, found

    ranks = run_ranks(size, compared)
    return next((reason for reason, _ in ranks if reason), None), [found for _, rank in ranks for found in rank]


def read(
    folder: Path, group: TensorParallelGroup, arithmetic: str = "bfloat16", **settings: Any
) -> DecoderLayout | str:
    """What a rank reads, in numbers; or why it reads nothing."""
    config = ModelConfig(model=str(folder), quantized_activations=arithmetic, **settings)
    try:
        found = read_stated(config, folder, group)
    except UnsupportedModelError as error:
        return str(error)
    return found if isinstance(found, str) else in_numbers(found[0])


def in_numbers(part: Any) -> Any:
    """The same part of a layout with the numbers of units, or of codes, in their place."""
    if isinstance(part, Linear):
        weights = tuple(numbers_of_units(one).to(torch.bfloat16) for one in part.units)
        weights += tuple(one.to(torch.bfloat16) for one in part.codes)
        return replace(part, weights=weights, units=(), codes=()) if weights else part
    if isinstance(part, tuple):
        return tuple(map(in_numbers, part))
    if is_dataclass(part) and not isinstance(part, type):
        if isinstance(part, DecoderLayout) and part.embedding.is_meta:
            part = replace(part, embedding=numbers_of_units(part.head.units[0]).to(part.embedding.dtype))
        found = replace(part, **{field.name: in_numbers(getattr(part, field.name)) for field in fields(part)})
        return in_one_linear(found) if isinstance(found, GatedDeltaNet) else found
    return part


def in_one_linear(net: GatedDeltaNet) -> GatedDeltaNet:
    """The same with rates among the outputs of `inputs`, as they are where nothing is quantized."""
    if net.rates is None:
        return net
    return replace(net, inputs=Linear(weights=(*net.inputs.weights, *net.rates.weights)), rates=None)


def numbers_of_units(stored: StoredMatrix) -> torch.Tensor:
    """Float32 [out, in], with rows of zeros where it is filled up."""
    assert stored.unit_form is not None
    numbers = torch.from_numpy(weight_of_units(stored.unit_form, stored.units(*stored.rows)).numbers())
    return torch.nn.functional.pad(numbers, (0, 0, 0, stored.padding))
