"""Row-invariant activation functions: a row's bits do not depend on how many rows share the call."""

import torch.nn.functional as F
from torch import Tensor, nn

VECTOR = 64
"""A whole number of steps of torch's vector loops on CPUs, in numbers of any dtype."""


class RowActivation(nn.Module):
    """An activation, called on rows of whole vectors.

    Torch runs over all numbers of a tensor in vectors and finishes what is left over with another formula of exp:
    which numbers those are depends on the number of rows, unless each row is a whole number of vectors.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """Whether this is one of transformers' activations, and without weights of its own."""
        from transformers.activations import ACT2CLS

        classes = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
        return type(module) in classes and not list(module.parameters())

    def forward(self, x: Tensor) -> Tensor:
        padding = -x.shape[-1] % VECTOR
        if padding == 0:
            result: Tensor = self.activation(x)
            return result
        padded: Tensor = self.activation(F.pad(x, (0, padding)))
        return padded[..., :-padding]
