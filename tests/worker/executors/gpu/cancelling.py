"""Products that cancel, so that another order of adding shows in nearly every value."""

import torch
from torch import Tensor


def cancelling_product(
    out_features: int, in_features: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, in] and a weight [out, in] whose product is zero but for rounding errors.

    Each term comes twice, with both signs, in a random order. With ordinary numbers the rounding to bfloat16 would hide
    all but one difference in some thousands.
    """
    generator = torch.Generator().manual_seed(in_features)
    order = torch.randperm(in_features, generator=generator)
    half, odd = in_features // 2, in_features % 2
    x = torch.randn(num_rows, half, generator=generator)
    w = torch.randn(min(out_features, 256), half, generator=generator)
    rows = torch.cat((x, x, torch.zeros(num_rows, odd)), 1)[:, order]
    weight = torch.cat((w, -w, torch.zeros(len(w), odd)), 1)[:, order].to(device, dtype)
    return rows.to(device, dtype), weight.repeat(-(-out_features // len(weight)), 1)[:out_features]
