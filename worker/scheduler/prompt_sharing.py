"""Prompt sharing by forking: one sequence of a request computes the prompt, and the others fork from it."""

from collections import defaultdict
from collections.abc import Hashable

from holdfast.worker.cache.window_blocks import NOTHING_SEEN, WindowPrefix
from holdfast.worker.scheduler.kept_prefixes import SharedPrefix
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus


class Siblings:
    """The running sequences by group, valid for one admission. Costs nothing while no sequence has a group."""

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._groups: dict[Hashable, list[Sequence]] | None = None

    def prefix_of(self, sequence: Sequence) -> SharedPrefix | None:
        """The longest prefix that a waiting sequence can share; None: wait, a running sibling still computes it.

        The wait costs hardly any time, because both would compute the same. Sequences behind it need not wait. The
        wait ends: the sibling runs, so it either computes the prompt or stops running.
        """
        num_common = min(sequence.num_prompt_tokens, sequence.num_skippable_tokens)
        parent = None
        if num_common > 0 and sequence.request.group_id:
            siblings = self._siblings_of(sequence)
            parent = max(siblings, key=lambda sibling: sibling.num_computed_tokens, default=None)
            if self._queues.slots is not None:  # of which one may still be where the prompt ends
                parent = next((each for each in siblings if each.num_computed_tokens == num_common), parent)
        if parent is not None and parent.num_computed_tokens < num_common:
            return None
        cached = self._queues.cached_prefix(sequence)
        if parent is None or num_common < cached.num_tokens:
            return cached
        if self._queues.slots is not None and parent.num_computed_tokens != num_common:
            return cached  # the parent's state is no longer the one after the prompt
        return self._fork(parent, num_common) or cached

    def first_ready(self) -> tuple[Sequence, SharedPrefix] | None:
        """The first waiting sequence that need not wait for a sibling, and its shared prefix. Those before it are set
        aside, until `WaitingQueue.return_all`.
        """
        waiting = self._queues.waiting
        while waiting.num_ready:
            sequence = waiting.first()
            has_group = bool(sequence.request.group_id)
            prefix = self.prefix_of(sequence) if has_group else self._queues.cached_prefix(sequence)
            if prefix is not None:
                return sequence, prefix
            waiting.set_aside(sequence)
        return None

    def add(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        if self._groups is not None and sequence.request.group_id:
            self._groups[sequence.request.group_id].append(sequence)

    def _siblings_of(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences of its group. That their prompts are equal is checked, because the group id is given by
        routers.
        """
        if self._groups is None:
            self._groups = defaultdict(list)
            for sibling in self._queues.running:
                self.add(sibling)
        block_size = self._queues.allocator.block_size
        group = self._groups[sequence.request.group_id]
        alive = (sibling for sibling in group if sibling.status is SequenceStatus.RUNNING)
        return [sibling for sibling in alive if _share_prompt(sequence, sibling, block_size)]

    def _fork(self, parent: Sequence, num_tokens: int) -> SharedPrefix | None:
        """Full blocks are shared. A last block that is not full is copied, because the fork writes to it next.

        None: the parent has returned the blocks of window layers that the next token sees.
        """
        seen: WindowPrefix | None = NOTHING_SEEN
        if self._queues.windows is not None and parent.window is not None:
            seen = self._queues.windows.fork(parent.window, num_tokens)
        if seen is None:
            return None
        num_whole = num_tokens // self._queues.allocator.block_size
        return SharedPrefix(parent.block_ids[:num_whole], num_tokens, parent, window=seen)


def _share_prompt(a: Sequence, b: Sequence, block_size: int) -> bool:
    """Whether prompts and salts are equal: full blocks by their hash, worked out once, as in the prefix cache."""
    if a.num_prompt_tokens != b.num_prompt_tokens:
        return False
    num_whole = a.num_prompt_tokens // block_size
    hashes = [each.hash_chain.hash_of(num_whole - 1, each.token_ids, block_size) for each in (a, b)]
    tails = [each.request.prompt_token_ids[num_whole * block_size :] for each in (a, b)]
    return hashes[0] == hashes[1] and tails[0] == tails[1]
