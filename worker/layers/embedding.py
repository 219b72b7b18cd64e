"""Vocabulary-parallel embedding and output head: token ids to hidden states, hidden states to logits.

The table is padded to a multiple of the number of ranks; a rank holds an equal, contiguous share of its rows.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.layers.linear import Linear


class VocabParallelEmbedding(nn.Module):
    """Rows `first_row` to `first_row + len(weight_slice) - 1` of the table. Every rank gets all hidden states."""

    def __init__(self, weight_slice: Tensor, first_row: int, group: TensorParallelGroup) -> None:
        super().__init__()
        self.register_buffer("weight", weight_slice.detach(), persistent=False)
        self.weight: Tensor
        self._first_row = first_row
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]. A token id outside the whole table gives zeros, except with one rank: IndexError."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first_row
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        hidden = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ScaledEmbedding(nn.Module):
    """An embedding whose vectors are multiplied by a constant (Gemma 3)."""

    scale: Tensor

    def __init__(self, embedding: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("scale", scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(token_ids)
        return vectors * self.scale


class VocabParallelHead(nn.Module):
    """This rank's rows of the output table. Every rank gets all logits, cut to `vocab_size`."""

    def __init__(
        self,
        weight_slice: Tensor,
        bias_slice: Tensor | None,
        group: TensorParallelGroup,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.linear = Linear(weight_slice, bias_slice)
        self._group = group
        self.vocab_size = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab_size]."""
        logits = self._group.all_gather(self.linear(x))
        return logits[..., : self.vocab_size]
