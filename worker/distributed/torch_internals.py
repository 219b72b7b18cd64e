"""Private APIs of PyTorch that Holdfast uses, all of them, as they were read in PyTorch 2.13."""

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # declared there; `torch.distributed` has it without a type

__all__ = ["TCPStore", "abort_process_group"]


def abort_process_group() -> None:
    """Ends the collectives that wait on NCCL, after a rank was lost; from any thread. Raises `RuntimeError` where there
    is no group.
    """
    dist.distributed_c10d._abort_process_group()
