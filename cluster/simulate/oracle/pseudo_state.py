"""States of the pseudo-model: in each slot a digest of the tokens before a position, and the drafts behind it.

As a kernel with a recurrence has it (docs/state-cache.md): the digest is that behind the last certain token, and what
drafts would make of it is remembered until the next step says, by where it begins, which of them were right. A state
that was lost, copied too late or carried past a wrong draft is another digest from there on.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from holdfast.worker.step_plan import ScheduledSequence, StateCopy

_LOST: Final = 0x10570000
"""Value of a state that is lost."""


class _State(NamedTuple):
    position: int
    digest: int
    drafts: tuple[int, ...]


class PseudoStates:
    """The slots of one replica."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [_State(-1, _LOST, ())] * num_slots
        """Content of each slot."""

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """One after the other, in this order."""
        for source, destination in copies:
            self.slots[destination] = self.slots[source]

    def advance(self, share: ScheduledSequence) -> int:
        """Takes the tokens of a share in; the digest behind the last of them, drafts included."""
        assert share.state_slot is not None, "each sequence of a step has a slot"
        num_certain = len(share.token_ids) - share.num_drafts
        digest = digest_of(share.token_ids[:num_certain], self._before(share.state_slot, share.first_position))
        drafts = share.token_ids[num_certain:]
        self.slots[share.state_slot] = _State(share.first_position + num_certain, digest, drafts)
        return digest_of(drafts, digest)

    def _before(self, slot: int, position: int) -> int:
        """The digest at a position: behind the last certain token, or any draft after it."""
        if position == 0:
            return 0
        state = self.slots[slot]
        num_right = position - state.position
        if not 0 <= num_right <= len(state.drafts):
            return _LOST
        return digest_of(state.drafts[:num_right], state.digest)


def digest_of(token_ids: Sequence[int], before: int = 0) -> int:
    """The digest behind these tokens, from the one before them."""
    return crc32(bytes(token_ids), before)
