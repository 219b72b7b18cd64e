"""Outputs of packed linears by module: each place of packed matrices has the number that its definition names."""

import numpy as np
import pytest
import torch

from holdfast.worker.executors.cpu.adapted_outputs import LANES, Site
from holdfast.worker.executors.cpu.adapters import AdaptedLinear, LowRank, PackedAdapter
from tests.worker.executors.cpu.native import library_or_skip

INPUTS = 6


def linear(packed_rows, modules):
    """A linear of stacked modules, each of a number of outputs, and its site."""
    part_of = np.repeat(np.arange(len(modules)), modules)
    rows = np.concatenate([np.arange(size) for size in modules])
    return Site(np.array(packed_rows), 2, INPUTS // 2, 32), part_of, rows


def padded(*pieces):
    """Packed rows: pieces one after the other, each filled up to sixteen."""
    return [row for piece in pieces for row in [*piece, *[-1] * (-len(piece) % LANES)]]


CASES = {
    "one module": (padded(range(64)), [64], [5]),
    "one after the other": (padded(range(32), range(32, 64)), [32, 32], [16, 3]),
    "alternating": ([*range(16), *range(32, 48), *range(16, 32), *range(48, 64)], [32, 32], [4, 4]),
    "alternating, of different ranks": ([*range(16), *range(32, 48), *range(16, 32), *range(48, 64)], [32, 32], [4, 9]),
    "irregular": ([*range(16), *range(16, 32), *range(48, 64), *range(32, 48)], [48, 16], [2, 3]),
    "in one block": (padded(range(12), range(12, 24), range(24, 40)), [6, 14, 20], [3, 1, 2]),
    "backwards": ([*range(31, -1, -1), *range(32, 64)], [40, 24], [7, 2]),
    "one has none": (padded(range(24), range(24, 56)), [20, 16, 20], [3, 0, 17]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_those_of_the_modules(case, dtype):
    packed_rows, modules, ranks = CASES[case]
    site, part_of, rows = linear(packed_rows, modules)
    draw = torch.Generator().manual_seed(0)
    parts = tuple(
        LowRank(a=torch.randn(rank, INPUTS, generator=draw), b=torch.randn(size, rank, generator=draw), scale=rank / 2)
        if rank
        else None
        for size, rank in zip(modules, ranks, strict=True)
    )
    packed = PackedAdapter(
        library_or_skip(), {"0.up": site}, {"0.up": AdaptedLinear(parts=parts, part_of=part_of, rows=rows)}, dtype
    )
    numbers, scales, spans = packed._kept
    firsts = np.cumsum(ranks) - ranks
    for number, part in enumerate(parts):
        for rank in range(ranks[number]):
            index = int(firsts[number]) + rank
            assert scales[index] == part.scale
            tile = numbers[index // LANES * 64 * LANES :][: 64 * LANES].view(2, 32, LANES)[:, :, index % LANES]
            assert tile[:, :3].reshape(-1).equal(part.a[rank].to(dtype))
            assert not tile[:, 3:].any()
    b = numbers[len(scales) * 64 :]
    for place, row in enumerate(packed_rows):
        span = spans[place // LANES]
        found = b[int(span["place"]) :][: int(span["end"] - span["first"]) * LANES].view(-1, LANES)[:, place % LANES]
        expected = torch.zeros(len(found), dtype=dtype)
        if row >= 0 and (part := parts[part_of[row]]) is not None:
            first = int(firsts[part_of[row]] - span["first"])
            expected[first : first + ranks[part_of[row]]] = part.b[rows[row]].to(dtype)
        assert found.equal(expected), (place, row)


def test_places_are_found_again_and_kept_for_the_same_arrays():
    site, part_of, rows = linear(padded(range(12), range(12, 24)), [12, 12])
    outputs = site.outputs(part_of, rows)
    assert site.outputs(part_of, rows) is outputs
    assert [site.rows[place] for place in outputs.place_of] == list(range(24))
    other = site.outputs(1 - part_of, rows)
    assert other is not outputs
    assert other.part_of[:16].tolist() == [1] * 12 + [-1] * 4
    assert outputs.spans((3, 2)) is outputs.spans((3, 2))
    assert outputs.spans((2, 2)).tolist() != outputs.spans((3, 2)).tolist()
