"""Check of weights while they are packed or copied: a NaN in a row that no other check covers would fail requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor


class NotFiniteError(ValueError):
    """A weight has numbers that are NaN or infinite."""


def check_finite(weight: Tensor) -> None:
    """Raises `NotFiniteError`. One pass without a copy, on the weight's device; codes and numbers of 8 bits pass."""
    if weight.is_meta or not weight.is_floating_point() or weight.itemsize == 1 or not weight.numel():
        return
    with _one_thread():
        low, high = torch.aminmax(weight.detach())  # a NaN is both
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        refuse(tuple(weight.shape), weight.dtype)


def not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """Name of the first of some weights of a floating type on the CPU that has a NaN or an infinity; None: none has.
    Quicker than `check_finite` of each, where they are many and small.
    """
    filled = {name: weight for name, weight in weights.items() if weight.numel()}
    if not filled:
        return None
    with _one_thread():
        ends = [end for weight in filled.values() for end in torch.aminmax(weight.detach())]
    found = torch.stack(ends).isfinite().view(-1, 2).all(dim=1)
    return next((name for name, is_finite in zip(filled, found.tolist(), strict=True) if not is_finite), None)


def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> NoReturn:
    """Raises `NotFiniteError` for a weight of which another check says that it is not finite."""
    raise NotFiniteError(f"a weight of shape {list(shape)} has NaN or infinite numbers in {dtype}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread reads 17 GB/s; several wait for each other, busily, which takes long where cores are shared."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
