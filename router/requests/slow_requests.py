"""Log of slow requests: one warning for each, which says where its time went.

What may not live here: measuring (`request_stats.py`, `router/dispatch/timeline.py`), the log's format.
"""

import logging

from holdfast.router.requests.request_stats import EndedRequest, RequestStats

logger = logging.getLogger(__name__)


class SlowRequests:
    """Told of each request when it is over."""

    def __init__(self, slow_s: float, stats: RequestStats) -> None:
        """Slow is what took at least `slow_s` seconds, however it ended."""
        self._slow_s = slow_s
        self._stats = stats

    def __call__(self, ended: EndedRequest) -> None:
        if ended.duration_s < self._slow_s:
            return
        self._stats.of(ended.model).num_slow += 1
        times = where_its_time_went(ended)
        told = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.2f} s" for name, seconds in times.items()
        )
        logger.warning(
            "request %s of model %s was slow (%s after %.2f s): %s; %d prompt and %d output tokens, replicas %s",
            ended.request_id,
            ended.model,
            ended.outcome,
            ended.duration_s,
            told,
            ended.num_prompt_tokens,
            ended.num_output_tokens,
            ", ".join(one.replica_id for one in ended.timeline.attempts) or "none",
            extra={"details": details(ended) | {name: round(seconds, 6) for name, seconds in times.items()}},
        )


def where_its_time_went(ended: EndedRequest) -> dict[str, float]:
    """Seconds by phase. What waits for the reader may go on beside decode; the others follow each other."""
    phases = ended.phases
    return {
        "queue_s": phases.queue_s,
        "replica_queue_s": phases.replica_queue_s,
        "prefill_s": phases.prefill_s,
        "decode_s": phases.decode_s,
        "failover_s": phases.failover_s,
        "suspended_s": phases.suspended_s,
        "reader_s": ended.reader_wait_s,
    }


def details(ended: EndedRequest) -> dict[str, str | float | list[str]]:
    """Of a log line in JSON."""
    return {
        "request_id": ended.request_id,
        "model": ended.model,
        "priority": ended.priority,
        "outcome": ended.outcome,
        "duration_s": round(ended.duration_s, 6),
        "num_prompt_tokens": ended.num_prompt_tokens,
        "num_output_tokens": ended.num_output_tokens,
        "num_failovers": ended.timeline.num_failovers,
        "replicas": [one.replica_id for one in ended.timeline.attempts],
    }
