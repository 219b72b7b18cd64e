"""How the sequences of each step are chosen: the interface of a batching policy, and continuous batching.

What may live here: decisions about tokens, places and blocks of the coming step. What may not: requests, results and
counters (`scheduler.py`), and how blocks change hands (`queues.py`).
"""

from collections.abc import Iterable
from typing import Protocol

from worker.config import SchedulerConfig
from worker.queues import SequenceQueues
from worker.sequence import Sequence

Share = tuple[Sequence, int]
"""A running sequence, and how many of its uncomputed tokens the step computes: at least one."""


class BatchingPolicy(Protocol):
    """Decides what a step does. Called by the scheduler alone."""

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        """Choose the next step, admitting and preempting as needed. Empty only if nothing waits or runs.

        At most `max_num_seqs` shares with at most `max_num_batched_tokens` tokens in all; blocks for all of them are
        allocated.
        """
        ...

    def release(self, queues: SequenceQueues) -> None:
        """Called whenever running sequences have ended: free the blocks of those that need not keep their place."""
        ...


class ContinuousBatching:
    """Every step takes whoever can use it: decodes first, then chunks of prefill, then newcomers.

    Blocks are allocated for the tokens that a sequence has, not for those it may draw. When they run out, the last in
    the order of service (the newest of the lowest priority) is preempted and will be recomputed.

    No request can starve, other than by an endless stream of requests of higher priority:
      - Victims are taken from the end of the order, so the first of the running is never preempted. It may take
        everyone else's blocks, and `Scheduler.add` has seen to it that alone it fits. It gets a token at every step:
        one is admitted only to a step that has served all who run and has a token left, so there are never more running
        than tokens in a step. So it ends, and then the next one is the first.
      - The first of the waiting is never overtaken. While it finds no room nobody else is admitted, so those running
        become fewer, until it does: at the latest when it is alone.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_tokens = config.max_num_batched_tokens
        self._max_num_running = config.max_num_seqs

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        decodes, prefills = self._split_running(queues)
        shares = [(sequence, 1) for sequence in decodes]
        budget = self._max_num_tokens - len(shares)
        chunks = share_out(prefills, budget)
        budget -= sum(num_tokens for _, num_tokens in chunks)
        return shares + chunks + self._admit(queues, budget)

    def release(self, queues: SequenceQueues) -> None:
        queues.release_finished()

    def _split_running(self, queues: SequenceQueues) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode, each with a block for its next token, and those with more to compute.

        Making room preempts from the end of `running` while this walks it from the front, so it never takes back what
        was given to those already passed, and the walk ends where the list ends by then.
        """
        block_size = queues.allocator.block_size
        decodes, prefills = [], []
        for sequence in queues.running:
            if sequence.num_uncomputed_tokens > 1:
                prefills.append(sequence)  # has had blocks for all of its tokens since it was admitted
            elif len(sequence.token_ids) <= len(sequence.block_ids) * block_size or _make_room(queues, sequence):
                decodes.append(sequence)
        return decodes, prefills

    def _admit(self, queues: SequenceQueues, budget: int) -> list[Share]:
        """Admit from the front of the waiting while there are places, tokens and blocks."""
        shares: list[Share] = []
        while queues.waiting and budget > 0 and len(queues.running) < self._max_num_running:
            num_blocks = queues.allocator.num_blocks_for(len(queues.waiting[0].token_ids))
            # Blocks for all of its tokens at once, and one more for everyone who runs already: a newcomer mostly stands
            # at the end of the order and would be the next victim, its prefill in vain, as soon as the others grow.
            if num_blocks + len(queues.running) > queues.allocator.num_free:
                break
            sequence = queues.admit_first(num_blocks)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            shares.append((sequence, num_tokens))
            budget -= num_tokens
        return shares


def share_out(sequences: Iterable[Sequence], budget: int) -> list[Share]:
    """Divide a budget of tokens among sequences, each getting all it can use before the next gets any."""
    shares: list[Share] = []
    for sequence in sequences:
        if budget == 0:
            break
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        shares.append((sequence, num_tokens))
        budget -= num_tokens
    return shares


def _make_room(queues: SequenceQueues, sequence: Sequence) -> bool:
    """Give a running sequence one more block, preempting others for it. False: it was itself the last and had to go."""
    while queues.allocator.num_free == 0:
        assert len(queues.running) > 1, "a sequence that runs alone must fit the cache"
        if queues.preempt_last() is sequence:
            return False
    queues.grow(sequence)
    return True
