"""Blocks on a device as rows of bytes, as `BlockBytes` has them of a CPU's memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.worker.executors.block_layout import Bytes
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.row_places import RowPlaces


class DeviceBlocks:
    """Blocks of one cache, which are copied by way of page-locked memory of the host. A copy comes after all work that
    was launched before it on the device's current stream, and is over when the call returns.
    """

    def __init__(self, cache: KVCache) -> None:
        pools = [pool.flatten(2).view(torch.uint8) for pool in cache.pools]  # [layers, num_blocks, bytes of a block]
        self._pools = [pool for pool in pools if pool.shape[2]]
        self._lengths = [pool.shape[0] * pool.shape[2] for pool in self._pools]
        self._device = self._pools[0].device
        self.row_bytes = sum(self._lengths)
        self._staged = self._host_memory(0)

    def read(self, block_ids: Sequence[int]) -> Sequence[Bytes]:
        """A copy of these blocks, rows of `row_bytes`."""
        ids = torch.tensor(block_ids, device=self._device)
        parts = [pool.index_select(1, ids).transpose(0, 1).flatten(1) for pool in self._pools]
        staged = self._rows(len(block_ids))
        staged.copy_(torch.cat(parts, dim=1), non_blocking=True)
        self._wait()
        return list(staged.numpy().copy())

    def read_into(self, block_ids: Sequence[int], places: RowPlaces) -> None:
        """Copies these blocks to places for rows of `row_bytes`, with their digests."""
        places.fill(self.read(block_ids))

    def write(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Overwrites the content of these blocks with rows of `row_bytes`. The ids differ from each other."""
        ids = torch.tensor(block_ids, device=self._device)
        staged = self._rows(len(block_ids))
        for place, row in zip(staged.numpy(), rows, strict=True):
            place[:] = row
        given = staged.to(self._device, non_blocking=True)
        for pool, part in zip(self._pools, torch.split(given, self._lengths, dim=1), strict=True):
            pool.index_copy_(1, ids, part.reshape(len(part), pool.shape[0], pool.shape[2]).transpose(0, 1))
        self._wait()

    def _rows(self, num_rows: int) -> Tensor:
        """The first rows of the page-locked memory, which grows to the largest call."""
        if len(self._staged) < num_rows:
            self._staged = self._host_memory(num_rows)
        return self._staged[:num_rows]

    def _host_memory(self, num_rows: int) -> Tensor:
        shape = (num_rows, self.row_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda" and num_rows > 0)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
