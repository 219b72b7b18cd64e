"""How the sequences of each step are chosen: the interface of a batching policy, and continuous batching.

What may live here: decisions about tokens, places and blocks of the coming step. What may not: requests, results and
counters (`scheduler.py`), and how blocks change hands (`queues.py`).
"""

from collections.abc import Iterable
from typing import Protocol

from worker.forking import Siblings
from worker.prompt_rating import num_step_tokens
from worker.queues import SequenceQueues
from worker.sequence import Sequence, SequenceStatus
from worker.step_limits import StepLimits

Share = tuple[Sequence, int]
"""A running sequence, and how many of its uncomputed tokens the step computes: at least one."""


class BatchingPolicy(Protocol):
    """Decides what a step does. Called by the scheduler alone."""

    limits: StepLimits
    """May be replaced between two steps."""

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        """Choose the next step, admitting and preempting as needed. Empty only if nothing waits or runs.

        At most `limits.max_num_seqs` shares with at most `limits.max_num_batched_tokens` tokens in all; blocks for all
        of them are allocated.
        """
        ...

    def release(self, queues: SequenceQueues) -> None:
        """Called whenever running sequences have ended: free the blocks of those that need not keep their place."""
        ...


class ContinuousBatching:
    """Every step takes whoever can use it: decodes first, then chunks of prefill, then newcomers.

    Blocks are allocated for the tokens that a sequence has, not for those it may draw. When they run out, one of the
    lowest priority among those running is preempted: the one with the fewest tokens computed, the newest of several,
    but never the first in the order of service.

    No request can starve, other than by an endless stream of requests of higher priority. Take the first in the order
    of service of all who are alive:
      - Once it runs it is the first of the running. So it is never preempted, it may take everyone else's blocks, and
        `Scheduler.add` has seen to it that alone it fits. It gets a token at every step: one is admitted only to a step
        that has served all who run and has a token left, so there are never more running than tokens in a step. So it
        ends, and then another one is the first of all.
      - While it waits, new or preempted earlier for one who was first then, it is the first of the waiting, and that
        one is never overtaken: until it finds room nobody else is admitted. Of those running the first always goes on
        and ends, by the same argument, so they become fewer until it does find room: at the latest when it is alone.
        Only while a sibling that runs computes its prompt is it passed over; that one is not held up by those behind.
    Which of the others is preempted does not matter to this. Blocks that are only cached count as free, so they are in
    nobody's way, and what a sequence shares it need not be given.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        decodes, prefills = self._split_running(queues)
        shares = [(sequence, 1) for sequence in decodes]
        budget = self._prefill_budget(len(shares))
        chunks = share_out(prefills, budget)
        budget -= sum(num_tokens for _, num_tokens in chunks)
        return shares + chunks + self._admit(queues, budget)

    def release(self, queues: SequenceQueues) -> None:
        queues.release_finished()

    def _prefill_budget(self, num_decode_tokens: int) -> int:
        """Tokens of a step that are left for prompts."""
        budget = max(0, self.limits.max_num_batched_tokens - num_decode_tokens)
        most = self.limits.max_num_prefill_tokens
        return budget if most is None or not num_decode_tokens else min(budget, most)

    def _split_running(self, queues: SequenceQueues) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode, each with a block for its next token, and those with more to compute."""
        block_size = queues.allocator.block_size
        decodes, prefills, grown_out = [], [], []
        for sequence in queues.running:
            num_tokens = len(sequence.token_ids)
            if num_tokens > sequence.num_computed_tokens + 1:
                prefills.append(sequence)  # has had blocks for all of its tokens since it was admitted
                continue
            decodes.append(sequence)
            if num_tokens > len(sequence.block_ids) * block_size:
                grown_out.append(sequence)
        if _grow(queues, grown_out):
            return decodes, prefills
        return _still_running(decodes), _still_running(prefills)

    def _admit(self, queues: SequenceQueues, budget: int) -> list[Share]:
        """Admit from the front of the waiting while there are places, tokens and blocks.

        Those whose sibling is still computing their prompt are passed over.
        """
        shares: list[Share] = []
        siblings, num_passed = Siblings(queues), 0
        while len(queues.waiting) > num_passed and budget > 0 and len(queues.running) < self.limits.max_num_seqs:
            sequence = queues.waiting[num_passed]
            if (prefix := siblings.prefix_of(sequence)) is None:
                num_passed += 1
                continue
            allocator = queues.allocator
            num_blocks = allocator.num_blocks_for(len(sequence.token_ids))
            num_shared = sum(allocator.ref_count(block_id) > 0 for block_id in prefix.block_ids)
            # Blocks for all of its tokens at once, and one more for everyone who runs already: a newcomer would often
            # be the next victim, its prefill in vain, as soon as the others grow.
            if num_blocks - num_shared + len(queues.running) > allocator.num_free:
                break
            queues.admit(sequence, num_blocks, prefix)
            siblings.add(sequence)
            num_tokens = min(num_step_tokens(sequence), budget)
            shares.append((sequence, num_tokens))
            budget -= num_tokens
        return shares


def share_out(sequences: Iterable[Sequence], budget: int) -> list[Share]:
    """Divide a budget of tokens among sequences, each getting all it can use before the next gets any."""
    shares: list[Share] = []
    for sequence in sequences:
        if budget == 0:
            break
        num_tokens = min(num_step_tokens(sequence), budget)
        shares.append((sequence, num_tokens))
        budget -= num_tokens
    return shares


def _grow(queues: SequenceQueues, sequences: Iterable[Sequence]) -> bool:
    """Give each of these running sequences one more block. False: someone was preempted for it, maybe one of them."""
    num_preemptions = queues.num_preemptions
    for sequence in sequences:
        while queues.allocator.num_free == 0 and sequence.status is SequenceStatus.RUNNING:
            queues.preempt(_victim(queues.running))
        if sequence.status is SequenceStatus.RUNNING:
            queues.grow(sequence)
    return queues.num_preemptions == num_preemptions


def _victim(running: list[Sequence]) -> Sequence:
    """Whose blocks go when they run out: of the lowest priority, the one that loses least, but never the first."""
    assert len(running) > 1, "a sequence that runs alone must fit the cache"
    lowest = running[-1].request.priority
    candidates = (sequence for sequence in reversed(running[1:]) if sequence.request.priority == lowest)
    return min(candidates, key=lambda sequence: sequence.num_computed_tokens)


def _still_running(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]
