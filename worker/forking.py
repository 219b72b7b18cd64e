"""Sequences of one request share their prompt: the first computes it, the others fork from it.

What may live here: whom a waiting sequence can fork from, how much they have in common, and when it is worth waiting
for. What may not: how blocks change hands (`queues.py`), and places, tokens and free blocks (`batching.py`).
"""

from collections import defaultdict

from worker.queues import SequenceQueues, SharedPrefix
from worker.sequence import Sequence, SequenceStatus


class Siblings:
    """The running sequences by group, for the time of one admission. Costs nothing while no sequence has a group."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._groups: dict[str, list[Sequence]] | None = None

    def prefix_of(self, sequence: Sequence) -> SharedPrefix | None:
        """The most that a waiting sequence can begin with; None: a sibling is still computing more than that.

        Not to be admitted then costs it no time, since both would compute the same. Whoever stands behind it need not
        wait: the sibling runs, so it gets on, and either it has soon computed the prompt or it runs no more.
        """
        block_ids = self._queues.cached_prefix(sequence)
        cached = SharedPrefix(tuple(block_ids), len(block_ids) * self._queues.allocator.block_size)
        if not sequence.request.group_id:
            return cached
        num_common = min(sequence.num_prompt_tokens, sequence.num_skippable_tokens)
        siblings = self._siblings_of(sequence)
        if num_common < cached.num_tokens or not siblings:
            return cached
        parent = max(siblings, key=lambda sibling: sibling.num_computed_tokens)
        if parent.num_computed_tokens >= num_common:
            return self._fork(parent, num_common)
        return cached if num_common == cached.num_tokens else None

    def add(self, sequence: Sequence) -> None:
        """Another one runs."""
        if self._groups is not None and sequence.request.group_id:
            self._groups[sequence.request.group_id].append(sequence)

    def _fork(self, parent: Sequence, num_tokens: int) -> SharedPrefix:
        """Whole blocks are shared. The last one, if it is not whole, is where the fork writes next: it gets a copy."""
        num_whole = num_tokens // self._queues.allocator.block_size
        return SharedPrefix(parent.block_ids[:num_whole], num_tokens, parent)

    def _siblings_of(self, sequence: Sequence) -> list[Sequence]:
        """Those that run and have its prompt. What the group's name promises is looked at, not believed."""
        if self._groups is None:
            self._groups = defaultdict(list)
            for running in self._queues.running:
                self.add(running)
        return [other for other in self._groups[sequence.request.group_id] if _share_prompt(sequence, other)]


def _share_prompt(sequence: Sequence, running: Sequence) -> bool:
    mine, its = sequence.request, running.request
    is_equal = (mine.cache_salt, mine.prompt_token_ids) == (its.cache_salt, its.prompt_token_ids)
    return is_equal and running.status is SequenceStatus.RUNNING
