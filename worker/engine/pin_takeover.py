"""Pin takeover: fetches the pinned prefixes of another replica that is leaving. A core without IO.

A few prefixes at a time are fetched as restores, after all blocks that requests wait for. The fetched blocks stay
pinned for the rest of the pin's time, within the tenant's budget on this replica.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.worker.engine.restore import Restore
from holdfast.worker.engine.restores import Restores
from holdfast.worker.request import PinnedPrefix
from holdfast.worker.scheduler.kept_prefixes import Pinning

MOST_OPEN: Final = 4
"""Prefixes that are brought at a time."""


class _Waiting(NamedTuple):
    prefix: PinnedPrefix
    source: str
    until_s: float


class PinTakeover:
    """Takes pins over on the leader's engine. Used by one thread."""

    def __init__(self, restores: Restores, pinning: Pinning) -> None:
        self._restores = restores
        self._pinning = pinning
        self._waiting: deque[_Waiting] = deque()
        self._open: dict[int, _Waiting] = {}  # by the tickets of their restores
        self.num_taken = 0
        """Prefixes that were pinned here."""

    def held(self, now: float) -> list[PinnedPrefix]:
        """Prefixes that are pinned here, to be handed on."""
        return self._pinning.held(now)

    def take(self, prefixes: Iterable[PinnedPrefix], source: str, now: float) -> None:
        """Takes over what the replica at this address has pinned."""
        self._waiting += [_Waiting(one, source, now + one.ttl_s) for one in prefixes]
        self._go_on(now)

    def note_over(self, restore: Restore, now: float) -> None:
        """A restore is over, as far as it went."""
        taken = self._open.pop(restore.ticket, None)
        if taken is not None:
            self._keep(taken, now)
            self._go_on(now)

    def give_up(self) -> None:
        """Ends all: the cache belongs to other weights now."""
        self._waiting.clear()
        self._open.clear()

    def _go_on(self, now: float) -> None:
        while self._waiting and len(self._open) < MOST_OPEN:
            taken = self._waiting.popleft()
            restore = self._restores.bring(taken.prefix, taken.source, now) if now < taken.until_s else None
            if restore is None:
                self._keep(taken, now)
            else:
                self._open[restore.ticket] = taken

    def _keep(self, taken: _Waiting, now: float) -> None:
        self.num_taken += now < taken.until_s
        self._pinning.keep(taken.prefix._replace(ttl_s=taken.until_s - now), now)
