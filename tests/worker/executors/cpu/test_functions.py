"""Elementary functions of our own: near the exact ones, NaN stays NaN, and the bits are the same in every class."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.executors.cpu.native import FUNCTIONS, function, library_or_skip, other_classes, same_bits

INF, NAN = math.inf, math.nan
SMALLEST = 2.0**-126
"""The smallest normal number: what is smaller is flushed to zero."""

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp2": torch.exp2,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.special.erf,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sin": torch.sin,
    "cos": torch.cos,
}

ULP = 2.0**-23

# The error that is allowed of f(x) = y. An exponential's grows with x, since x * log2(e) is rounded once;
# an activation has its factor's error times x.
BOUNDS: dict[str, Callable[[Tensor, Tensor], Tensor | float]] = {
    "exp2": lambda x, y: 2.0 * ULP * y + SMALLEST,
    "exp": lambda x, y: (2.0 + x.abs()) * ULP * y + SMALLEST,
    "sigmoid": lambda x, y: (3.0 + x.abs()) * ULP * y + SMALLEST,
    "tanh": lambda x, y: 3.0 * ULP * y.abs() + SMALLEST,
    "erf": lambda x, y: ULP * y.abs() + SMALLEST,
    "silu": lambda x, y: (4.0 + x.abs()) * ULP * y.abs() + (1.0 + x.abs()) * SMALLEST,
    "gelu": lambda x, y: ULP * x.abs() + SMALLEST,
    "gelu_tanh": lambda x, y: ULP * x.abs() + SMALLEST,
    "sin": lambda x, y: 0.501 * ULP * y.abs() + 1e-12,
    "cos": lambda x, y: 0.501 * ULP * y.abs() + 1e-12,
}

RANGES = {"exp2": (-140.0, 127.0), "exp": (-100.0, 88.0), "sin": (0.0, 131072.0), "cos": (0.0, 131072.0)}
"""Others: -100 to 100. Angles are positions times frequencies, of contexts up to 131,072."""


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    low, high = RANGES.get(name, (-100.0, 100.0))
    spread = torch.empty(60_000).uniform_(low, high, generator=generator)
    near = torch.empty(60_000).uniform_(max(low, -6.0), 6.0, generator=generator)
    tiny = torch.logspace(-37, 0, 4_000) * (
        1 if low == 0.0 else torch.randint(0, 2, (4_000,), generator=generator) * 2 - 1
    )
    return torch.cat((spread, near, tiny, torch.arange(64.0), torch.arange(64.0) / 512 + 0.9))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_is_within_its_bound(name):
    x = inputs(name)
    y = function(library_or_skip(), name, x)
    exact = EXACT[name](x.double())
    error = (y.double() - exact).abs()
    bound = torch.zeros_like(error) + BOUNDS[name](x.double(), exact)
    worst = (error / bound).argmax()
    assert error[worst] <= bound[worst], (x[worst].item(), y[worst].item(), exact[worst].item())


SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, 1e-40, -1e-40, SMALLEST, 3e38, -3e38, 127.0, -125.5, -126.5, -127.5])


@pytest.mark.parametrize("other", other_classes())
def test_the_bits_are_the_same_in_every_class(other):
    first, second = library_or_skip("avx2"), library_or_skip(other)
    for name in FUNCTIONS:
        x = inputs(name)
        x = x if name in ("sin", "cos") else torch.cat((x, SPECIAL.clamp(max=127.0) if name == "exp2" else SPECIAL))
        assert same_bits(function(first, name, x), function(second, name, x)), name


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "exp2": {0.0: 1.0, -INF: 0.0, -126.0: SMALLEST, -127.0: 0.0, -150.0: 0.0, 127.0: 2.0**127},
        "exp": {0.0: 1.0, -INF: 0.0, -200.0: 0.0},
        "sigmoid": {0.0: 0.5, INF: 1.0, -INF: 0.0},
        "tanh": {0.0: 0.0, INF: 1.0, -INF: -1.0, 1000.0: 1.0},
        "erf": {0.0: 0.0, INF: 1.0, -INF: -1.0, 1000.0: 1.0, -1000.0: -1.0},
        "silu": {0.0: 0.0, INF: INF, 3e38: 3e38},
        "gelu": {0.0: 0.0, INF: INF, 1000.0: 1000.0},
        "gelu_tanh": {0.0: 0.0, INF: INF, 1000.0: 1000.0},
        "sin": {0.0: 0.0},
        "cos": {0.0: 1.0},
    }.items(),
)
def test_special_values(name, values):
    x, y = torch.tensor(list(values)), torch.tensor(list(values.values()))
    assert torch.equal(function(library_or_skip(), name, x), y)


@pytest.mark.parametrize("name", FUNCTIONS[:8])
def test_nan_stays_nan(name):
    for class_name in other_classes():
        assert function(library_or_skip(class_name), name, torch.full((16,), NAN)).isnan().all()


@pytest.mark.parametrize("name", ["exp2", "exp"])
def test_powers_do_not_fall(name):
    """A softmax keeps the order of its scores."""
    x = torch.linspace(-3, 3, 100_001)
    assert (function(library_or_skip(), name, x).diff() >= 0).all()
