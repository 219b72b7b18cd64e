"""State cache on CPUs: for each layer that keeps a state a pool of slots, one for a sequence. Here is only the memory,
and the sizes of what lies there; who owns which slot is the scheduler's (`worker/cache/state_slots.py`).
"""

import mmap
from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor

from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.prefault import Pages
from holdfast.worker.executors.cpu.tile_memory import address_of
from holdfast.worker.executors.layout_arithmetic import mamba_unit
from holdfast.worker.executors.state_layers import GatedDeltaNet, Mamba2
from holdfast.worker.executors.step_batch import IntArray

VALUE_BYTES = 4
"""float32, whatever the model's dtype: a state that is rounded on the way gives other bits when it is restored."""


class StateCache:
    """All layers' pools, [num_slots, length] float32 each. Memory is taken where it is written to.

    A slot's content counts only for a sequence that has computed a token: at position 0 all states are zeros.
    """

    def __init__(self, lengths: Sequence[int], num_slots: int, library: CDLL) -> None:
        """`lengths`: numbers that each layer keeps of a sequence, in the order of the layers that keep some."""
        self.num_slots = num_slots
        self._pages = [Pages.mapped(num_slots, length * VALUE_BYTES) for length in lengths]
        self.pools = [
            _pool(pages.memory, num_slots, length) for pages, length in zip(self._pages, lengths, strict=True)
        ]
        """[num_slots, length] of each layer."""
        self.bytes = BlockBytes([pool.view(torch.uint8).numpy() for pool in self.pools], library)
        """Slots, to be copied elsewhere and back."""

    @property
    def addresses(self) -> list[int]:
        """Address of each layer's pool."""
        return [address_of(pages.memory) for pages in self._pages]

    def copy(self, copies: IntArray) -> None:
        """Copies slots to others, `copies` [2, N]: sources and destinations, one after the other in this order."""
        for source, destination in copies.T.tolist():
            for pool in self.pools:
                pool[destination].copy_(pool[source])

    def give_back(self, slots: IntArray) -> None:
        """Returns the memory of these slots, ascending, to the system: their content is lost."""
        for pages in self._pages:
            pages.give_back(slots)


def recurrence_numbers(net: GatedDeltaNet | Mamba2) -> dict[str, Any]:
    """Fields of a `NativeRecurrence` that are plain numbers. Of Mamba2 C and B are queries and keys, x are values."""
    if isinstance(net, GatedDeltaNet):
        return {
            "dt_scale": 1.0,
            "key_heads": net.num_key_heads,
            "value_heads": net.num_value_heads,
            "key_dim": net.key_dim,
            "value_dim": net.value_dim,
            "width": net.width,
            "unit_heads": net.num_value_heads // net.num_key_heads,
            "heads_per_slice": net.num_value_heads // net.num_slices,
            "gate_inputs": net.gate_inputs,
        }
    return {
        "dt_scale": net.dt_scale,
        "z_scale": net.z_scale,
        "least_dt": net.time_bounds[0],
        "most_dt": net.time_bounds[1],
        "key_heads": net.num_groups,
        "value_heads": net.num_heads,
        "key_dim": net.state_dim,
        "value_dim": net.head_dim,
        "width": net.width,
        "unit_heads": mamba_unit(net.num_groups, net.num_heads),
        "heads_per_slice": net.num_heads // net.num_slices,
        "norm_heads": net.norm_heads,
        "norm_groups": net.norm_groups,
        "first_group": net.first_group,
    }


def _pool(memory: mmap.mmap, num_slots: int, length: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, count=num_slots * length).view(num_slots, length)
