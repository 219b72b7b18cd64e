"""A sequence with an adapter by itself, in pieces: for runners of any executor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.worker.executors.steps import Part


class InPieces:
    """A runner's part: it has `blocks`, and `with_slots`, the logits of all tokens by sequence."""

    ids: Sequence[int]
    """Tokens of a sequence, unless others are given."""

    def alone(self, slot: int, ids: Sequence[int] = (), chunks: Sequence[int] = ()) -> Tensor:
        ids = ids or self.ids
        blocks, rows, first, turn = self.blocks(len(ids)), [], 0, 0
        while first < len(ids):
            size = chunks[turn % len(chunks)] if chunks else len(ids)
            rows += self.with_slots([slot], Part(first, ids[first : first + size], blocks))
            first, turn = first + size, turn + 1
        return torch.cat(rows)
