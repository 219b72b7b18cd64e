"""Draft-model progress: how many tokens of each sequence the draft model has computed, and its work for the next step.

Its keys and values lie in blocks of the same ids as the large model's, so sequences that share a prefix share it in
both caches. Where it has not kept up, in a prefix that was computed while drafts did not pay, its drafts are poor, and
nothing else suffers. What may not live here: the draft model itself (`worker/model/draft_model.py`).
"""

from holdfast.worker.plan.step_plan import Drafting
from holdfast.worker.scheduling.sequence import Sequence


class DraftModelProgress:
    """Tokens of each sequence that the draft model has read, and that still count."""

    def __init__(self) -> None:
        self._num_read: dict[int, int] = {}  # by sequence id

    def drafting(self, sequence: Sequence, end: int, num_drafts: int, max_num_tokens: int) -> Drafting | None:
        """Read on to position `end`, then guess `num_drafts` tokens; None where there is nothing to read.

        Reads at most `max_num_tokens`; a sequence that has more to catch up with gets its guesses in a later step.
        """
        start = self.settle(sequence)
        token_ids = tuple(sequence.token_ids[start : min(end, start + max_num_tokens)])
        if not token_ids:
            return None
        if start + len(token_ids) < end:
            num_drafts = 0
        # The last draft is guessed and not read.
        self._num_read[sequence.sequence_id] = start + len(token_ids) + max(0, num_drafts - 1)
        return Drafting(first_position=start, token_ids=token_ids, num_drafts=num_drafts)

    def settle(self, sequence: Sequence) -> int:
        """How far it has read. Wrong drafts do not count, nor what a preemption took; a cached prefix has been read."""
        num_computed = sequence.num_computed_tokens
        num_read = min(self._num_read.get(sequence.sequence_id, num_computed), num_computed)
        self._num_read[sequence.sequence_id] = num_read
        return num_read

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._num_read.pop(sequence.sequence_id, None)
