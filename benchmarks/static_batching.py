"""Static batching policy, which continuous batching replaced. A baseline of the benchmark."""

from collections.abc import Iterable

from holdfast.worker.scheduler.batching import Share, StepLimits, share_out
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence, SequenceStatus


class StaticBatching:
    """A batch is taken whole, prefilled, and decoded until its last sequence has ended; only then comes the next one.

    A sequence gets blocks for the longest it may become, so nobody is ever preempted, and one that has ended keeps
    its place and its blocks idle until the batch is done.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits

    def schedule(self, queues: SequenceQueues) -> list[Share]:
        if not queues.running:
            self._take_batch(queues)
        alive = [sequence for sequence in queues.running if sequence.status is SequenceStatus.RUNNING]
        prefills = [sequence for sequence in alive if sequence.num_uncomputed_tokens > 1]
        shares: list[Share] = []
        share_out(queues, prefills or alive, self.limits.max_num_batched_tokens, shares)
        return shares

    def schedule_ahead(self, queues: SequenceQueues) -> list[Share]:
        return []

    def release(self, queues: SequenceQueues) -> None:
        if all(sequence.status is SequenceStatus.FINISHED for sequence in queues.running):
            queues.release_finished()

    def candidates(self, queues: SequenceQueues) -> Iterable[Sequence]:
        """Those who may be in the next batch, in the order in which they are asked. The first that waits is one."""
        return tuple(queues.waiting)

    def _take_batch(self, queues: SequenceQueues) -> None:
        allocator = queues.allocator
        for sequence in self.candidates(queues):
            num_blocks = allocator.num_blocks_for(sequence.max_num_slots)
            if len(queues.running) >= self.limits.max_num_seqs or num_blocks > allocator.num_free:
                break
            queues.admit(sequence, num_blocks)
