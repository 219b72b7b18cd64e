"""Roles of replicas: who computes long prompts, who decodes, and when it is sooner to compute a prompt elsewhere and
send its blocks. Pure functions of what a router knows.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final

MOVE_BYTE_S: Final = 1e-9
"""Seconds a byte of a transfer, between hosts of which none was measured."""

HAND_ON_S: Final = 0.02
"""Seconds to hand a request on besides its bytes, before some were measured."""

MIN_HAND_ON_S: Final = 0.001

BORROW_S: Final = 0.01
"""Seconds to fetch a prefix besides its bytes, as replicas count them (`worker/engine/restores.py`)."""

LATE_TOKEN: Final = 4.0
"""Cost of a second by which a running stream's next token is late, against a second before a first token. Of 0.25, 1, 4
and 16 the one with the best goodput and time per token under a storm of long prompts (`python -m benchmarks.roles`).
"""

_WEIGHT: Final = 0.1  # of the newest request in the moving average


class Role(Enum):
    """Part of a replica in the requests of its model."""

    BOTH = "both"
    PREFILL = "prefill"
    """Computes long prompts, and hands their requests on."""
    DECODE = "decode"
    """Gets no long prompts while others take them."""


class Roles:
    """Roles of one model's replicas, and what handing a request on costs."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        """`num_prefill` of its replicas compute long prompts alone, and `num_decode` get none."""
        self.num_prefill = num_prefill
        self._num_decode = num_decode
        self.hand_on_s = HAND_ON_S
        """Measured seconds from the first token of a request to its second, beyond the transfer of its bytes."""

    def assign(self, replica_ids: Iterable[str]) -> dict[str, Role]:
        """Roles in the order of ids, so that routers that know the same replicas agree. With too few replicas for both
        roles, each replica has both, and no role is assigned.
        """
        ordered = sorted(replica_ids)
        if not (self.num_prefill or self._num_decode) or len(ordered) <= max(self.num_prefill, 1):
            return {}
        ends = self.num_prefill, self.num_prefill + self._num_decode
        kinds = [Role.PREFILL] * ends[0] + [Role.DECODE] * (ends[1] - ends[0])
        return dict(zip(ordered, [*kinds, *[Role.BOTH] * len(ordered)], strict=False))

    def note_hand_on(self, pause_s: float, moving_s: float) -> None:
        """A request was handed on: how long its client waited, and how long its bytes were to take."""
        over_s = max(MIN_HAND_ON_S, pause_s - moving_s)
        self.hand_on_s += _WEIGHT * (over_s - self.hand_on_s)


def borrowed(num_tokens: int, token_s: float, move_s: float) -> tuple[float, int]:
    """Seconds until tokens that another replica has cached are available, by transfer or by computing; and the number
    that is computed.
    """
    moving_s = BORROW_S + num_tokens * move_s
    computing_s = num_tokens * token_s
    return (moving_s, 0) if moving_s < computing_s else (computing_s, num_tokens)


def local_s(num_new: int, num_elsewhere: int, token_s: float, move_s: float, num_running: int) -> float:
    """Cost in seconds of a prompt that is computed where it is decoded: until it is there, and what others wait.

    `num_new` tokens have to be computed before its first one, those ahead of it among them; `num_elsewhere` of its
    tokens are cached in another replica. The `num_running` streams beside it are delayed by the computed tokens.
    """
    there_s, num_computed = borrowed(num_elsewhere, token_s, move_s) if num_elsewhere > 0 else (0.0, 0)
    return num_new * token_s + there_s + LATE_TOKEN * (num_new + num_computed) * token_s * num_running


def elsewhere_s(num_new: int, token_s: float, num_moved: int, move_s: float, hand_on_s: float) -> float:
    """Cost in seconds of a prompt that is computed in one replica, and decoded in another, which lacks `num_moved`."""
    return num_new * token_s + hand_on_s + num_moved * move_s
