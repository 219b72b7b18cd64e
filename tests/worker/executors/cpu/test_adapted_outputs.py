"""Outputs of packed linears by module: each place of packed matrices has the number that its definition names."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from holdfast.worker.executors.adapters import AdaptedLinear, LowRank, StoredMatrix
from holdfast.worker.executors.cpu.adapted_outputs import LANES, Site, Sites
from holdfast.worker.executors.cpu.adapters import AdapterPlan, PackedAdapter
from holdfast.worker.executors.cpu.tile_memory import mapped_memory
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
    "in one block": ([*padded(range(12), range(12, 24), range(24, 40)), *[-1] * 16], [6, 14, 20], [3, 1, 2]),
    "backwards": ([*range(31, -1, -1), *range(32, 64)], [40, 24], [7, 2]),
    "one has none": (padded(range(24), range(24, 56)), [20, 16, 20], [3, 0, 17]),
}


@dataclass(frozen=True)
class WholeContent:
    """A file of which all is there."""

    whole: memoryview

    def there(self, least: int) -> memoryview:
        return self.whole


def in_a_file(matrices):
    """Parts [rank, inputs] and [outputs, rank], and the content that they lie in, behind a byte of something else."""
    content, parts = bytearray(b"x"), []
    for a, b in matrices:
        places = []
        for matrix in (a, b):
            places.append(StoredMatrix(matrix.dtype, tuple(matrix.shape), len(content)))
            content += matrix.numpy().tobytes()
        parts.append(LowRank(a=places[0], b=places[1], scale=len(a) / 2) if len(a) else None)
    return tuple(parts), WholeContent(memoryview(content))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_those_of_the_modules(case, dtype):
    packed_rows, modules, ranks = CASES[case]
    site, part_of, rows = linear(packed_rows, modules)
    draw = torch.Generator().manual_seed(0)
    matrices = [
        (torch.randn(rank, INPUTS, generator=draw), torch.randn(size, rank, generator=draw))
        for size, rank in zip(modules, ranks, strict=True)
    ]
    parts, content = in_a_file(matrices)
    columns, probe = np.arange(INPUTS), torch.randn(INPUTS, generator=draw).bfloat16().float()
    added = AdaptedLinear(parts=parts, part_of=part_of, rows=rows, columns=columns, probe=probe)
    plan = AdapterPlan(Sites({"0.up": site}), {"0.up": added}, dtype)
    memory = mapped_memory(plan.num_bytes)
    memory.write(b"\xff" * len(memory))  # of another adapter
    packed = PackedAdapter(library_or_skip(), plan, content, memory)
    assert all(one.error <= 1e-4 * max(one.largest, one.usual) for one in packed.differences["0.up"])
    numbers, scales = torch.frombuffer(memory, dtype=dtype, count=plan.num_bytes // dtype.itemsize), packed.scales
    spans = site.outputs(part_of, rows).spans(added.ranks)
    firsts = np.cumsum(ranks) - ranks
    for number, (a, _) in enumerate(matrices):
        for rank in range(ranks[number]):
            index = int(firsts[number]) + rank
            assert scales[index] == ranks[number] / 2
            tile = numbers[index // LANES * 64 * LANES :][: 64 * LANES].view(2, 32, LANES)[:, :, index % LANES]
            assert tile[:, :3].reshape(-1).equal(a[rank].to(dtype))
            assert not tile[:, 3:].any()
    b = numbers[len(scales) * 64 :]
    for place, row in enumerate(packed_rows):
        span = spans[place // LANES]
        found = b[int(span["place"]) :][: int(span["end"] - span["first"]) * LANES].view(-1, LANES)[:, place % LANES]
        expected = torch.zeros(len(found), dtype=dtype)
        if row >= 0 and parts[part_of[row]] is not None:
            first = int(firsts[part_of[row]] - span["first"])
            expected[first : first + ranks[part_of[row]]] = matrices[part_of[row]][1][rows[row]].to(dtype)
        assert found.equal(expected), (place, row)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_matrices_of_any_type_and_inputs_that_do_not_follow_each_other(stored):
    """What is packed are the columns of this rank, rounded once."""
    site, part_of, rows = linear(range(64), [64])
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw).to(stored) for shape in ((5, 2 * INPUTS), (64, 5)))
    content = bytearray(b"xyz" + b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in (a, b)))
    places = StoredMatrix(stored, (5, 2 * INPUTS), 3), StoredMatrix(stored, (64, 5), 3 + a.nbytes)
    columns, probe = np.array([7, 2, 9, 0, 11, 4]), torch.arange(INPUTS).float()
    part = LowRank(a=places[0], b=places[1], scale=1.0)
    added = AdaptedLinear(parts=(part,), part_of=part_of, rows=rows, columns=columns, probe=probe)
    plan = AdapterPlan(Sites({"0.up": site}), {"0.up": added}, torch.bfloat16)
    packed = PackedAdapter(library_or_skip(), plan, WholeContent(memoryview(content)), mapped_memory(plan.num_bytes))
    numbers = torch.frombuffer(packed.memory, dtype=torch.bfloat16, count=64 * LANES).view(2, 32, LANES)
    assert numbers[:, :3, :5].reshape(INPUTS, 5).T.equal(a[:, columns].float().bfloat16())
    ((difference,),) = packed.differences.values()
    expected = b.float().bfloat16().float() @ (a[:, columns].float().bfloat16().float() @ probe)
    assert difference.largest == pytest.approx(float(expected.abs().max()), rel=1e-5)
    assert difference.error <= 1e-4 * difference.largest


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
