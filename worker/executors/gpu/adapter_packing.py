"""Adapters in a device's memory: one rank's share of the matrices, and the proof that a step adds their product."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.adapters import AdaptedLinear, Difference, FileContent, LowRank
from holdfast.worker.executors.gpu.adapter_launches import (
    RANKS,
    WORDS,
    AdapterLaunches,
    AdapterSite,
    adapter_tiles,
)
from holdfast.worker.executors.gpu.kernels import adapters as kernels
from holdfast.worker.executors.gpu.mixtures import RowGroups

_LINE: Final = 64  # numbers: matrices begin at multiples of it
_FIRSTS: Final[int] = kernels.FIRSTS.value


@dataclass(frozen=True, slots=True)
class _Place:
    """Places of one linear's matrices in an adapter's memory."""

    name: str
    site: AdapterSite
    added: AdaptedLinear
    first: int
    """First number of A."""
    first_of_b: int
    first_scale: int
    width: int

    @property
    def num_ranks(self) -> int:
        return sum(self.added.ranks)

    def record(self, numbers: int, scales: int, itemsize: int) -> list[int]:
        """Words of the table, for memory at these addresses."""
        firsts = np.cumsum([0, *self.added.ranks]).tolist()
        firsts += [firsts[-1]] * (WORDS - _FIRSTS - len(firsts))
        places = (numbers + self.first * itemsize, numbers + self.first_of_b * itemsize, scales + self.first_scale * 4)
        return [*places, self.num_ranks, self.width, *firsts]


class _Matrices(NamedTuple):
    """One module's matrices as the file has them, on the device."""

    a: Tensor
    b: Tensor
    scale: float


class DevicePlan:
    """Plan of packing all adapters of one form: everything but the matrices' numbers."""

    def __init__(self, sites: Mapping[str, AdapterSite], adapted: Mapping[str, AdaptedLinear]) -> None:
        """Raises `ConfigurationError` for a linear whose adapters the kernels do not add."""
        self.places: list[_Place] = []
        end = num_scales = 0
        for name, added in adapted.items():
            site = sites.get(name)
            if site is None:
                raise ConfigurationError(
                    f"{_module(name)}: on GPUs, adapters of attention, of dense MLPs, of the embedding and of the head "
                    "are served alone"
                )
            if len(added.parts) > site.most_parts:
                raise ConfigurationError(f"{_module(name)}: it is a linear of {len(added.parts)} modules on GPUs")
            assert (len(added.columns), len(added.rows)) == (site.num_inputs, site.num_outputs), name
            ranks, width = sum(added.ranks), -(-max(added.ranks) // RANKS) * RANKS
            first_of_b = end + _up(ranks * site.num_inputs)
            self.places.append(_Place(name, site, added, end, first_of_b, num_scales, width))
            end, num_scales = first_of_b + _up(site.num_outputs * width), num_scales + ranks
        self.num_numbers, self.num_scales, self.num_sites = end, num_scales, len(sites)


def _up(count: int) -> int:
    return -(-count // _LINE) * _LINE


def _module(place: str) -> str:
    index, _, name = place.partition(".")
    return f"{name} of layer {index}" if name else index


class DeviceAdapter:
    """One rank's share of an adapter."""

    def __init__(self, plan: DevicePlan, content: FileContent, like: Tensor, launches: AdapterLaunches) -> None:
        """`content`: of the file. `like`: of the model's dtype, on the device. It touches nothing that a step uses."""
        self._launches, self._like = launches, like
        self.places = plan.places
        self.numbers = torch.zeros(plan.num_numbers, dtype=like.dtype, device=like.device)
        scales = np.zeros(plan.num_scales, dtype=np.float32)
        self.records = np.zeros((plan.num_sites, WORDS), dtype=np.int64)
        """The table's words of its slot."""
        for place in plan.places:
            own = [np.full(rank, 0.0 if part is None else part.scale) for rank, part in _parts(place.added)]
            scales[place.first_scale :][: place.num_ranks] = np.concatenate(own)
        self.scales = torch.from_numpy(scales).to(like.device)
        for place in plan.places:
            words = place.record(self.numbers.data_ptr(), self.scales.data_ptr(), like.element_size())
            self.records[place.site.number] = words
        found = [self._load(place, content, packs=True) for place in plan.places]
        self.differences = _differences(plan.places, found)
        """Differences between what a step adds and the matrices, for each part of each linear: `adapter_places.py`
        judges them.
        """

    def compare(self, content: FileContent) -> dict[str, list[Difference]]:
        """The differences once more, as it is packed now."""
        return _differences(self.places, [self._load(place, content, packs=False) for place in self.places])

    def matrices(self, place: _Place) -> tuple[Tensor, Tensor]:
        """A [ranks, inputs] and B [outputs, width] of a linear, in place."""
        site = place.site
        a = self.numbers[place.first :][: place.num_ranks * site.num_inputs].view(-1, site.num_inputs)
        b = self.numbers[place.first_of_b :][: site.num_outputs * place.width].view(-1, place.width)
        return a, b

    def _load(self, place: _Place, content: FileContent, *, packs: bool) -> Tensor:
        """Packs the matrices of one linear, or only proves them: [parts, 3], float64."""
        added, device = place.added, self.numbers.device
        part_of = torch.from_numpy(added.part_of).to(device)
        rows, columns = (torch.from_numpy(each).to(device) for each in (added.rows, added.columns))
        there = content.there(added.end)
        matrices = [_in_file(part, there, device) for part in added.parts]
        if packs:
            self._pack(place, matrices, part_of, rows, columns)
        probe = added.probe.to(device).to(self._like.dtype)
        sums = self._sums(place, probe, part_of.to(torch.int32))
        compared = [
            _compared(one, part_of == number, rows, columns, probe, sums) for number, one in enumerate(matrices)
        ]
        return torch.stack(compared)

    def _pack(
        self, place: _Place, matrices: Sequence[_Matrices | None], part_of: Tensor, rows: Tensor, columns: Tensor
    ) -> None:
        (a, b), first = self.matrices(place), 0
        for number, one in enumerate(matrices):
            if one is not None:
                rank, own = len(one.a), (part_of == number).nonzero()[:, 0]
                a[first : first + rank] = one.a[:, columns].to(a.dtype)
                b[own, :rank] = one.b[rows[own]].to(b.dtype)
                first += rank

    def _sums(self, place: _Place, probe: Tensor, part_of: Tensor) -> Tensor:
        """Numbers that a step adds to the outputs of a row of fixed inputs [tiles, outputs], in tiles of each width."""
        site, device = place.site, probe.device
        table = torch.from_numpy(self.records[None]).to(device)
        sums = []
        for tile in adapter_tiles(probe.dtype):
            rows = torch.full((1, tile.tokens), -1, dtype=torch.int32, device=device)
            rows[0, 0] = 0
            groups = RowGroups(tile, torch.zeros(1, dtype=torch.int32, device=device), rows)
            stride = -(-place.num_ranks // RANKS) * RANKS
            inner = torch.zeros((site.num_slices * site.num_pieces, 1, stride), device=device)
            out = torch.zeros((site.num_slices, 1, site.num_outputs), device=device)
            self._launches.shrink(site, probe[None], table, groups, inner)
            self._launches.expand(site, inner, self._like, table, part_of, groups, out)
            sums.append(out.sum(0))
        return torch.cat(sums)


def _parts(added: AdaptedLinear) -> list[tuple[int, LowRank | None]]:
    return list(zip(added.ranks, added.parts, strict=True))


def _in_file(part: LowRank | None, content: memoryview, device: torch.device) -> _Matrices | None:
    return None if part is None else _Matrices(part.a.of(content).to(device), part.b.of(content).to(device), part.scale)


def _compared(
    one: _Matrices | None, is_own: Tensor, rows: Tensor, columns: Tensor, probe: Tensor, sums: Tensor
) -> Tensor:
    """[3], float64: as `Difference`. The product of the file's matrices, of all inputs of the module, most of which may
    be other ranks', and zero here.
    """
    if one is None:
        return torch.zeros(3, dtype=torch.float64, device=probe.device)
    a, b = (each.to(probe.dtype).double() for each in (one.a, one.b))
    x = torch.zeros(a.shape[1], dtype=torch.float64, device=probe.device).index_add_(0, columns, probe.double())
    own = is_own.nonzero()[:, 0]
    expected = (b @ (a @ x * one.scale))[rows[own]]
    size = probe.double().square().mean().sqrt() * abs(one.scale)
    usual = a[:, columns].norm(dim=1).max() * size * b.abs().max()
    return torch.stack([(sums[:, own].double() - expected).abs().max(), expected.abs().max(), usual])


def _differences(places: Sequence[_Place], found: Sequence[Tensor]) -> dict[str, list[Difference]]:
    """One wait for the device."""
    if not found:
        return {}
    rows = iter(torch.cat(list(found)).tolist())
    return {place.name: [Difference(*next(rows)) for _ in place.added.parts] for place in places}
