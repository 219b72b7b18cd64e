"""Resumable call: one request that survives the loss of its router. What of the output its client has, what to send to
the next router, and how output that comes after is merged. For every transport, without IO: time is passed in.
"""

from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.router.resume_record import ResumeRecord, SequenceDelta


class ResumableCall:
    """What is known of one request, whichever routers it was sent to."""

    def __init__(self, retry_policy: RetryPolicy, now: float, record: ResumeRecord | None = None) -> None:
        """Without a `record` there is no stream until `record` is set: its identity comes from a router."""
        self.retry_policy = retry_policy
        self.record = record
        self.attempt = 0
        """Number of the last submission, from 1."""
        self.sent_at = now
        self._began_at = now

    @property
    def is_over(self) -> bool:
        """The client has the whole stream: all that may be missing is the end of the call."""
        return self.record is not None and self.record.is_over

    def submit(self, now: float) -> ResumeRecord | None:
        """Counts a submission. Returns what it must carry; None where it is the request alone."""
        self.attempt += 1
        self.sent_at = now
        self.retry_policy.note_sent()
        if self.record is None or self.attempt == 1:
            return None
        self.record.age_s = now - self._began_at
        return self.record

    def merge(self, delta: SequenceDelta) -> bool:
        """As `ResumeRecord.merge`, of output that a router has sent; retries begin anew with that."""
        assert self.record is not None, "a stream has begun"
        self.retry_policy.note_news()
        return self.record.merge(delta)

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """How long to wait before the next submission; None: give up. `hint_s` is what the router has said of it."""
        return self.retry_policy.pause_s(now, hint_s)
