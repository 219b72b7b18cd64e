"""A group of ranks as processes of this machine, over pipes: for tests whose ranks share memory of a device.

Values travel through main memory, whatever device they are on.
"""

import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch

from holdfast.worker.executors.tensor_parallel import TensorParallelGroup, ordered_sum


class PipedGroup(TensorParallelGroup):
    """One rank's end: a pipe to each other rank."""

    def __init__(self, rank: int, pipes: dict[int, Connection]) -> None:
        self.rank = rank
        self.size = len(pipes) + 1
        self._pipes = pipes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return ordered_sum(self._exchange(x))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def broadcast(self, message: Any) -> Any:
        return self._exchange(message)[0]

    def close(self) -> None:
        pass

    def _exchange(self, value: Any) -> list[Any]:
        """Pair by pair, in one order on all ranks, so that none waits in a circle."""
        on_device = isinstance(value, torch.Tensor)
        sent = pickle.dumps(value.cpu() if on_device else value)  # a pipe's own way shares a tensor's memory
        received = {self.rank: sent}
        for peer, pipe in sorted(self._pipes.items()):
            if self.rank < peer:
                pipe.send_bytes(sent)
                received[peer] = pipe.recv_bytes()
            else:
                received[peer] = pipe.recv_bytes()
                pipe.send_bytes(sent)
        found = [pickle.loads(received[rank]) for rank in range(self.size)]
        return [each.to(value.device) for each in found] if on_device else found


def pipes_between(size: int, context: Any) -> list[dict[int, Connection]]:
    """For each rank a pipe to each other one; of a context of multiprocessing."""
    pipes: list[dict[int, Connection]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            pipes[one][other], pipes[other][one] = context.Pipe()
    return pipes
