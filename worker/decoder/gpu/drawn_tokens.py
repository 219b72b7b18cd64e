"""Drawn tokens of the GPU executor: where the next step finds them on the device, and their way to the host.

What may live here: the tokens of the last steps. What may not: drawing them (`executor.py`), and which of them a step
goes on from (`worker/distributed/step_batch.py`).
"""

from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.decoder.gpu.kernels.pending import put_in
from holdfast.worker.decoder.gpu.launches import Launch

NUM_IN_FLIGHT: Final = 2
"""Steps whose tokens may be on their way to the host."""

_BLOCK: Final = 256


class SentTokens:
    """Tokens on their way to the host. To be read before `NUM_IN_FLIGHT` others are sent."""

    def __init__(self, host: Tensor, arrived: Any) -> None:
        """`arrived` is an event of the device, None where the device is the host."""
        self._host = host
        self._arrived = arrived

    def read(self) -> list[int]:
        """Waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class DrawnTokens:
    """The tokens that steps of at most `max_rows` rows draw."""

    def __init__(self, max_rows: int, device: torch.device, launch: Launch) -> None:
        is_cuda = device.type == "cuda"
        host = torch.device("cpu") if is_cuda else device
        make_event: Any = torch.cuda.Event  # torch does not say its type
        self._hosts = [
            torch.zeros(max_rows, dtype=torch.int32, device=host, pin_memory=is_cuda) for _ in range(NUM_IN_FLIGHT)
        ]
        self._arrivals = [make_event() if is_cuda else None for _ in range(NUM_IN_FLIGHT)]
        self._launch = launch
        self._last: Tensor | None = None
        self._next = 0

    def put_in(self, token_ids: Tensor) -> None:
        """Puts the last step's tokens into `token_ids` of the next one, where those are below 0."""
        assert self._last is not None, "the last step drew no tokens on the device"
        arguments = {"token_ids": token_ids, "drawn": self._last, "num_rows": len(token_ids), "BLOCK": _BLOCK}
        self._launch(put_in, (-(-len(token_ids) // _BLOCK),), arguments, num_warps=4, num_stages=1)

    def send(self, tokens: Tensor) -> SentTokens:
        """Copies what the last step has drawn to the host, without a wait. They stay until the next step draws."""
        host, arrived = self._hosts[self._next][: len(tokens)], self._arrivals[self._next]
        self._last, self._next = tokens, (self._next + 1) % NUM_IN_FLIGHT
        host.copy_(tokens, non_blocking=True)
        if arrived is not None:
            arrived.record()
        return SentTokens(host, arrived)

    def forget(self) -> None:
        """The last step's tokens are drawn by the host, or it draws none."""
        self._last = None
