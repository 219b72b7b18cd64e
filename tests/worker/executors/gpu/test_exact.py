"""Functions of the kernels of draws have the native sampler's bits, and their sums its order."""

import math

import numpy as np
import torch
from torch import Tensor

from tests.worker.executors.gpu.interpreter import launch, tl, triton  # isort: skip  # first: it skips without Triton
from holdfast.worker.executors.gpu.kernels import draws, exact
from holdfast.worker.executors.gpu.kernels.exact import exp2_of, log_of, noise, noise_key
from tests.reference import sampler
from tests.worker.executors.cpu.native import function, library_or_skip

COUNT = 4096
masses = draws.masses


@triton.jit
def functions(x, powers, y, logarithms, bits, low, high, position, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(powers + places, exp2_of(tl.load(x + places)))
    tl.store(logarithms + places, log_of(tl.load(y + places)))
    key = noise_key(tl.load(low), tl.load(high), tl.load(position))
    tl.store(bits + places, noise(key, places).to(tl.int64))


@triton.jit
def sums(logits, out, scale, top, least, bar, vocab, num_blocks, space):
    of_all, above = masses(logits, scale, top, least, bar, vocab, num_blocks, space, logits, -1, False)
    tl.store(out, of_all)
    tl.store(out + 1, above)


def run(kernel, **arguments) -> None:
    launch(kernel, (1,), arguments, num_warps=4, num_stages=1)


def test_functions():
    """Powers down to what is no normal number; logarithms to an ulp; noise of a seed beyond 32 bits."""
    torch.manual_seed(0)
    x = -torch.cat(
        (torch.rand(COUNT - 96) * 130, torch.linspace(125.9, 126.1, 90), torch.tensor([0, 0.5, 1, 2, 126, 1e9]))
    )
    y = torch.cat((torch.rand(COUNT // 2) * 2, torch.rand(COUNT // 2) * 2.0**-32)).double()
    seed, position = 0x5_1234_5678, 77
    found = {
        "powers": torch.empty(COUNT),
        "logarithms": torch.empty(COUNT, dtype=torch.float64),
        "bits": torch.empty(COUNT, dtype=torch.int64),
    }
    words = {"low": seed & 0xFFFFFFFF, "high": seed >> 32, "position": position}
    run(functions, x=x, y=y, COUNT=COUNT, **found, **{name: torch.tensor([word]).int() for name, word in words.items()})
    assert torch.equal(found["powers"].view(torch.int32), function(library_or_skip(), "exp2", x).view(torch.int32))
    assert (found["powers"][x > -125] > 0).all()
    error = found["logarithms"].numpy() - np.log(y.numpy())
    assert (np.abs(error) <= np.spacing(np.abs(np.log(y.numpy())))).all()
    key = torch.tensor(sampler.noise_key(seed, position, sampler.TOKEN_STREAM))
    assert torch.equal(found["bits"], sampler.noise(key, torch.arange(COUNT)))


def in_order(part: Tensor) -> float:
    """Blocks of 64 as four times 16 lanes in float32, summed block after block in float64, then lane by lane."""
    four = torch.nn.functional.pad(part, (0, -len(part) % 64)).view(-1, 2, 2, 16)
    pairs = four[:, :, 0] + four[:, :, 1]
    total = torch.zeros(16, dtype=torch.float64)
    for block in pairs[:, 0] + pairs[:, 1]:
        total += block.double()
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return float(total)


def test_masses_are_summed_in_the_native_order():
    library, vocab, scale = library_or_skip(), 5000, 1.25
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 4
    scaled = logits * torch.tensor(scale)
    top, least, bar = float(scaled.max()), float(scaled[7]), float(scaled[11])
    part = function(library, "exp2", (scaled - top) * exact.LOG2_E.value)
    out = torch.empty(2, dtype=torch.float64)
    space = torch.full((draws.SPACE_BLOCKS.value * draws.LANES.value,), math.nan)
    shared = {"logits": logits, "out": out, "scale": scale, "top": top, "least": least, "bar": bar}
    run(sums, vocab=vocab, num_blocks=80, space=space, **shared)
    assert out.tolist() == [in_order(part.where(scaled >= least, 0)), in_order(part.where(scaled > bar, 0))]
