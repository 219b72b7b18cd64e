"""Drawn tokens of a device: what the last step has drawn, where the next one goes on from it without the host.

What may live here: which tensor that is, and putting it into a step. What may not: drawing (`executor.py`,
`sampler.py`), and which of the tokens a sequence goes on from (`worker/distributed/step_batch.py`).
"""

from typing import Final

from torch import Tensor

from holdfast.worker.decoder.gpu.kernels.pending import put_in
from holdfast.worker.decoder.gpu.launches import Launch

_BLOCK: Final = 256


class DrawnTokens:
    """The tokens of the last step that was launched. Its executor and its sampler write them down."""

    def __init__(self, launch: Launch) -> None:
        self.last: Tensor | None = None
        """[draws], int32, -1 for a row without a token; None where nothing was drawn here. They stay in their buffer
        until the next step draws, which is after it was given them.
        """
        self._launch = launch

    def put_in(self, token_ids: Tensor) -> None:
        """Puts them into `token_ids` of the next step, where those are below 0."""
        assert self.last is not None, "the last step drew no tokens on the device"
        arguments = {"token_ids": token_ids, "drawn": self.last, "num_rows": len(token_ids), "BLOCK": _BLOCK}
        self._launch(put_in, (-(-len(token_ids) // _BLOCK),), arguments, num_warps=4, num_stages=1)
