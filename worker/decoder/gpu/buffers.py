"""Buffers that stay: memory of a device that steps use one after the other, and of the host to fill it and to read it.

What may not live here: what is in them.
"""

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.decoder.gpu.step_wait import StepWait


class Buffers:
    """Memory that steps use one after the other, by name. It grows, and then graphs that read it are of no use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, Tensor] = {}
        self.generation = 0
        """Moves when a buffer has moved."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor with whatever is in there; the same memory for the same name."""
        count = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < count or memory.dtype != dtype:
            self.generation += memory is not None
            memory = self._memory[name] = torch.empty(count, dtype=dtype, device=self.device)
        return memory[:count].view(shape)

    def take_zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `take`, of memory that is zero at first."""
        memory = self._memory.get(name)
        tensor = self.take(name, shape, dtype)
        if self._memory[name] is not memory:
            self._memory[name].zero_()
        return tensor


_NUM_STAGES: Final = 2
"""Copies that may be on their way while the next step is written."""


class Staging:
    """Arrays of int32 on the host, which are filled in turns and copied to a device without a wait."""

    def __init__(self, size: int, device: torch.device, wait: StepWait) -> None:
        self._wait = wait
        is_cuda = device.type == "cuda"
        self._stages = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGES)]
        make_event: Any = torch.cuda.Event  # torch does not say its type
        self._copied = [make_event() for _ in range(_NUM_STAGES)] if is_cuda else []
        self._next = 0

    @property
    def size(self) -> int:
        return len(self._stages[0])

    def free(self) -> Tensor:
        """The array whose turn it is. No copy reads it any more."""
        if self._copied:
            self._wait.wait(self._copied[self._next])
        return self._stages[self._next]

    def copy(self, target: Tensor) -> None:
        """Copies the beginning of this turn's array to `target`, flat; the next turn is another one's."""
        target.copy_(self._stages[self._next][: len(target)], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next = (self._next + 1) % _NUM_STAGES


_FEWEST_READ: Final = 1 << 14
"""What is read back of 256 rows with log-probabilities."""


class Reading:
    """Numbers on their way from a device."""

    def __init__(self, host: Tensor, shape: tuple[int, ...], arrived: Any, wait: StepWait) -> None:
        """`arrived` is an event of the device, or None where nothing is to be waited for."""
        self._wait = wait
        self._host = host
        self._shape = shape
        self._arrived = arrived

    def wait(self) -> NDArray[np.int32]:
        """The numbers. To be read before as many others as there are stages have been started. Raises `ReplicaError` as
        `StepWait.wait` does.
        """
        self._wait.wait(self._arrived)
        numbers: NDArray[np.int32] = self._host.numpy().reshape(self._shape)
        return numbers


class Readback:
    """Copies int32 from a device to the host without a wait, for some steps in turn."""

    def __init__(self, device: torch.device, wait: StepWait) -> None:
        self._wait = wait
        self._is_cuda = device.type == "cuda"
        self._host_device = torch.device("meta" if device.type == "meta" else "cpu")
        self._stages = [self._stage(_FEWEST_READ) for _ in range(_NUM_STAGES)]
        make_event: Any = torch.cuda.Event  # torch does not say its type
        self._arrived: list[Any] = [make_event() if self._is_cuda else None for _ in range(_NUM_STAGES)]
        self._next = 0

    def start(self, source: Tensor) -> Reading:
        """Begins with a contiguous tensor of the device."""
        turn, count = self._next, source.numel()
        self._next = (turn + 1) % _NUM_STAGES
        if count > len(self._stages[turn]):
            self._stages[turn] = self._stage(1 << count.bit_length())
        host = self._stages[turn][:count]
        host.copy_(source.view(-1), non_blocking=True)
        if self._is_cuda:
            self._arrived[turn].record()
        return Reading(host, tuple(source.shape), self._arrived[turn], self._wait)

    def _stage(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._host_device, pin_memory=self._is_cuda)
