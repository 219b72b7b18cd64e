"""Bucketed batching policy: static batches of sequences with a similar bound on their length. A baseline of the
benchmark.
"""

from collections.abc import Iterable

from benchmarks.static_batching import StaticBatching
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.sequence import Sequence


class BucketedBatching(StaticBatching):
    """Static batching in which a batch takes only sequences of one bucket, so that less of it idles until it is done.

    This is Multi-Bin Batching (Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput", 2024):
    bins by output length, each batch from one bin. In the place of their prediction stands the bound that the request
    itself sets, and the bins are powers of two of it. Unlike theirs, a batch does not wait until it is full: it is
    taken from the bin of the first in the order of service, who therefore waits for one batch at most.

    Buckets by the length of the prompt, as in BucketServe (Zheng et al., 2025), save padding; here nothing is padded.
    """

    def candidates(self, queues: SequenceQueues) -> Iterable[Sequence]:
        if not queues.waiting:
            return ()
        bucket = _bucket(queues.waiting.first())
        return tuple(sequence for sequence in queues.waiting if _bucket(sequence) == bucket)


def _bucket(sequence: Sequence) -> int:
    """Sequences with 1, 2 to 3, 4 to 7, ... tokens to come are in one bucket each."""
    return (sequence.max_len - len(sequence.token_ids)).bit_length()
