"""Layouts of checkpoints for one rank or several, and the places where two of them differ."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.tensor_parallel import SingleRank, TensorParallelGroup
from holdfast.worker.models.stated_layout import read_stated
from tests.fake_group import run_ranks


def stated(folder: Path, group: TensorParallelGroup | None = None, dtype: str = "auto", **settings: Any) -> Any:
    """One rank's share of what a folder is read as, dequantized unless the settings say otherwise. Fails with the
    reason where it is not stated.
    """
    settings = {"quantized_activations": "bfloat16", **settings}
    read = read_stated(ModelConfig(model=str(folder), dtype=dtype, **settings), folder, group or SingleRank())
    assert not isinstance(read, str), read
    layout, _ = read
    assert isinstance(layout, DecoderLayout)
    return layout


def differences_of(ours: Path, theirs: Path, size: int = 1, dtype: str = "auto", **settings: Any) -> list[str]:
    """Between two folders, on all ranks; the settings are those of the first."""

    def compared(group: TensorParallelGroup) -> list[str]:
        return differences(stated(ours, group, dtype, **settings), stated(theirs, group, dtype))

    return [found for rank in run_ranks(size, compared) for found in rank]


def differences(ours: object, theirs: object, path: str = "layout") -> list[str]:
    """The places where two parts of layouts differ. The parts of a linear may be cut in other ways."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype and bits(ours).equal(bits(theirs))
        return [] if same else [path]
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}[{index}]")]
    if is_dataclass(ours) and type(ours) is type(theirs):
        if isinstance(ours, Linear) and isinstance(theirs, Linear) and len(ours.weights) != len(theirs.weights):
            ours, theirs = joined(ours), joined(theirs)
        return [
            found
            for name in (item.name for item in fields(ours))
            for found in differences(getattr(ours, name), getattr(theirs, name), f"{path}.{name}")
        ]
    return [] if type(ours) is type(theirs) and ours == theirs else [path]


def joined(linear: Linear) -> Linear:
    """With one weight."""
    return replace(linear, weights=(torch.cat(linear.weights),))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
