"""Resumable call: one request that survives the loss of its router. What of the output its client has, what to send to
the next router, and how output that comes after is merged. For every transport, without IO: time is passed in.

`HeldCall` is the core for HTTP: the headers and bytes to send, the meaning of a response's status, and the bytes of a
stream that the client gets.
"""

import json
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.router.resume import Identity, ResumeRecord, SequenceDelta
from holdfast.router.router_losses import ROUTERS_LOST
from holdfast.router.wire.resume_codec import HOLD, MARK, RESUME, StreamFailure, read_mark, resume_json

SENT_ONCE: Final = ("/admin/", "/v1/batches", "/v1/conversations", "/v1/files")
"""Paths of operators' commands: their effect is not known when the router is lost."""


def is_sent_once(method: str, path: str) -> bool:
    """Whether a request is never sent to another router."""
    return method != "GET" and path.startswith(SENT_ONCE)


class ResumableCall:
    """State of one request across all routers it was sent to."""

    def __init__(self, retry_policy: RetryPolicy, now: float, record: ResumeRecord | None = None) -> None:
        """Begins a call. Without a `record` there is no stream until `record` is set: the stream's identity comes from
        a router.
        """
        self.retry_policy = retry_policy
        self.record = record
        self.attempt = 0
        """Number of the last submission, from 1."""
        self.sent_at = now
        self._began_at = now

    @property
    def is_over(self) -> bool:
        """The client has the whole stream: only the end of the call may be missing."""
        return self.record is not None and self.record.is_over

    def submit(self, now: float) -> ResumeRecord | None:
        """Counts a submission. Returns the data to send; None where it is the request alone."""
        self.attempt += 1
        self.sent_at = now
        self.retry_policy.note_sent()
        if self.record is None or self.attempt == 1:
            return None
        self.record.age_s = now - self._began_at
        return self.record

    def merge(self, delta: SequenceDelta) -> bool:
        """Merges output from a router, as `ResumeRecord.merge`; the retry budget starts anew with it."""
        assert self.record is not None, "a stream has begun"
        self.retry_policy.note_news()
        return self.record.merge(delta)

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """Seconds to wait before the next submission; None: give up. `hint_s` is the router's retry hint."""
        return self.retry_policy.pause_s(now, hint_s)


_COMMENT: Final = b":"
_MARK_AT: Final = b"\n" + MARK
_BUSY: Final = 429  # HTTP status
_AWAY: Final = 503  # HTTP status
_OF_PROXIES: Final = (502, 503, 504)  # HTTP statuses

PROOF_S: Final = 0.05
"""A connection that breaks sooner after a request was sent may be that of a proxy that has no router behind it."""

LONGEST_READ_S: Final = 15.0
"""A router that is lost later than this after a request was sent has read it: its supervisor ends it sooner."""

Verdict: TypeAlias = Literal["take", "again", "end"]
"""Treatment of a response: pass it to the client, ask again, or end a stream that has begun."""


class HeldCall:
    """One request, whichever routers it was sent to. Time is passed in."""

    def __init__(self, content: bytes, retry_policy: RetryPolicy, now: float) -> None:
        self._content = content
        self._call = ResumableCall(retry_policy, now)
        self._buffer = b""
        self.failed: Failed | None = None
        """Failure by which a router ended the stream, if it did."""

    @property
    def record(self) -> ResumeRecord | None:
        """Resume record of a stream that has begun."""
        return self._call.record

    @property
    def is_over(self) -> bool:
        """The client has the whole stream."""
        return self._call.is_over

    # --- out ---

    def submission(self, now: float) -> tuple[dict[str, str], bytes]:
        """Headers and body of the next submission."""
        self._buffer, self.failed = b"", None
        record = self._call.submit(now)
        headers = {HOLD: str(self._call.attempt)}
        if num_lost := self._call.retry_policy.num_routers_lost:
            headers[ROUTERS_LOST] = str(num_lost)
        if record is None:
            return headers, self._content
        written = resume_json(record)
        return headers | {RESUME: str(len(written))}, self._content + written

    # --- in ---

    def verdict(self, status: int, hold: str | None, should_retry: str | None) -> Verdict:
        """On a response, by its status and headers. `hold` is None where no Holdfast router answers."""
        has_begun, retry_policy = self.record is not None, self._call.retry_policy
        if status == 200:
            if hold is None and has_begun:
                return "again"  # a stranger cannot go on with it
            retry_policy.note_taken()
            if not has_begun and hold is not None and (identity := Identity.of(hold)) is not None:
                self._call.record = ResumeRecord(identity=identity)
            return "take"
        if hold is None:
            return "again" if has_begun and status in _OF_PROXIES else self._refused()
        may_retry = should_retry == "true"
        is_away = status == _AWAY or (status == _BUSY and retry_policy.was_taken)
        return "again" if may_retry and is_away else self._refused()

    def _refused(self) -> Verdict:
        return "take" if self.record is None else "end"

    def push(self, data: bytes) -> bytes:
        """Bytes for the client after more bytes of a stream: all events up to the last mark, without marks.

        Raises `ValueError` for a mark that no router writes, or that leaves a gap.
        """
        assert self.record is not None, "a stream has begun"
        self._buffer = self._buffer + data if self._buffer else data
        handed = []
        while (end := self._one_mark()) is not None:
            handed.append(end)
        return b"".join(handed)

    def _one_mark(self) -> bytes | None:
        """The events before the next mark, which is merged into the record; None if it has not come yet."""
        if self._buffer.startswith(MARK):
            at = 0
        else:
            at = self._buffer.find(_MARK_AT) + 1
            if not at:
                self._drop_comment()
                return None
        end = self._buffer.find(b"\n\n", at)
        if end < 0:
            return None
        events, mark = self._buffer[:at], read_mark(self._buffer[at + len(MARK) : end])
        self._buffer = self._buffer[end + 2 :]
        if isinstance(mark, StreamFailure):
            self.failed = Failed(events, mark.may_retry, mark.retry_after_s)
            return b""
        self._call.merge(mark)
        return events

    def _drop_comment(self) -> None:
        """A comment of a stream that waits stands alone."""
        end = self._buffer.find(b"\n\n")
        if self._buffer.startswith(_COMMENT) and 0 <= end == len(self._buffer) - 2:
            self._buffer = b""

    def note_lost(self, now: float, *, was_sent: bool) -> None:
        """The connection is gone; where the request `was_sent`, a router may have been reading it."""
        if was_sent:
            is_proof = PROOF_S <= now - self._call.sent_at < LONGEST_READ_S
            self._call.retry_policy.note_router_lost(is_proof=is_proof)

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """Seconds to wait before the next submission; None: give up."""
        return self._call.pause_s(now, hint_s)


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a router has ended a stream with."""

    events: bytes
    """Events of the failed stream for the client."""
    may_retry: bool
    retry_after_s: float | None


def error_event(body: bytes) -> bytes:
    """An error's body as the last event of a stream, in the shape of the vendor whose body it is."""
    try:
        is_named = json.loads(body).get("type") == "error"
        data = b"data: " + body.replace(b"\n", b" ") + b"\n\n"
    except (ValueError, AttributeError):
        said = {"message": body[:200].decode(errors="replace"), "type": "server_error", "param": None, "code": None}
        return b"data: " + json.dumps({"error": said}).encode() + b"\n\n"
    return b"event: error\n" + data if is_named else data
