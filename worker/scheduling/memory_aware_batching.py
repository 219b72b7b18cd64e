"""Memory-aware batching: continuous batching that admits by the estimated peak memory of the running sequences."""

from holdfast.worker.scheduling.batching import ContinuousBatching
from holdfast.worker.scheduling.queues import SequenceQueues, SharedPrefix
from holdfast.worker.scheduling.sequence import Sequence, SequenceStatus
from holdfast.worker.scheduling.step_limits import StepLimits


class MemoryAwareBatching(ContinuousBatching):
    """Continuous batching in which a newcomer must fit beside everyone's estimated peak, not their present blocks.

    It trades places for preemptions, as the schedulers with predicted output lengths do (Jaillet et al., "Online
    Scheduling for LLM Inference with KV Cache Constraints", 2025). The estimate is the running mean of the output
    lengths that finished so far, at most a request's own bound; the bound itself before anything has finished, and for
    one that has outrun the mean. All peaks are taken to come at once, and prefixes in common are not counted on. So
    while no estimate is too low, nothing is preempted for memory; else preemption works as in continuous batching. A
    better class preempts worse ones as there, too, and nobody starves by the same argument: alone, all fit.
    """

    def __init__(self, limits: StepLimits) -> None:
        super().__init__(limits)
        self._num_finished = 0
        self._num_finished_tokens = 0

    def release(self, queues: SequenceQueues) -> None:
        for sequence in queues.running:
            if sequence.status is SequenceStatus.FINISHED:
                self._num_finished += 1
                self._num_finished_tokens += sequence.num_output_tokens
        super().release(queues)

    def _has_memory(self, queues: SequenceQueues, sequence: Sequence, prefix: SharedPrefix) -> bool:
        num_blocks = sum(self._peak_num_blocks(queues, member) for member in (*queues.running, sequence))
        return num_blocks <= queues.allocator.num_blocks and super()._has_memory(queues, sequence, prefix)

    def _peak_num_blocks(self, queues: SequenceQueues, sequence: Sequence) -> int:
        num_slots = sequence.max_num_slots
        if self._num_finished:
            num_expected = sequence.num_prompt_tokens + -(-self._num_finished_tokens // self._num_finished)
            if len(sequence.token_ids) < num_expected:
                num_slots = min(num_slots, num_expected - 1)
        return queues.allocator.num_blocks_for(num_slots)
