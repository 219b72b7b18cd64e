"""Units of the product, for the plain loop of their rule."""

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.coded import UNITS_TOGETHER, Offset, UnitForm, Units
from tests.reference.unit_products import UNIT, Floats, Ints, UnitWeight


def weight_of_units(form: UnitForm, units: Units) -> UnitWeight:
    codes = _codes(units).reshape(len(units.codes), -1, UNIT)
    offsets = None if units.offsets is None else units.offsets.float().numpy()
    if units.factors is not None:
        return _of_factors(form, units, codes)
    return UnitWeight(
        bits=form.bits,
        codes=codes,
        scales=units.scales.float().numpy(),
        zeros=offsets.astype(np.int64) if form.offset is Offset.ZERO_POINTS and offsets is not None else None,
        minima=offsets if form.offset is Offset.MINIMA else None,
    )


def _codes(units: Units) -> Ints:
    codes = _whole(units.codes)
    if units.codes.dtype == torch.int8:
        return codes + 128
    if units.codes.shape[1] < units.scales.shape[1] * UNIT:
        return np.stack((codes & 15, codes >> 4), -1)
    return codes


def _of_factors(form: UnitForm, units: Units, codes: Ints) -> UnitWeight:
    """Bytes times the factor that eight units of the whole weight have together."""
    assert units.factors is not None
    assert units.offsets is not None
    together = (form.before + np.arange(codes.shape[1])) // UNITS_TOGETHER
    factors: Floats = units.factors.float().numpy()[:, together]
    if form.offset is Offset.BYTE_HALVES:
        halves = np.stack((_whole(units.scales), _whole(units.offsets)), -1)
        return UnitWeight(bits=form.bits, codes=codes, scales=factors[..., 0], halves=halves)
    scales, minima = (part.float().numpy() * factors[..., i] for i, part in enumerate((units.scales, units.offsets)))
    return UnitWeight(bits=form.bits, codes=codes, scales=scales, minima=-minima)


def _whole(tensor: Tensor) -> Ints:
    return tensor.numpy().astype(np.int64)
