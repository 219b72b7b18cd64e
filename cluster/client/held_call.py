"""Held call: one HTTP request that survives the loss of its router. What to send, what to hand on,
when to ask again.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.router.generation import Chunk
from holdfast.router.resume import HOLD, MARK, RESUME, Identity, Noted, Progress, Resume
from holdfast.router.router_losses import ROUTERS_LOST
from holdfast.worker.errors import InternalError
from holdfast.worker.request import FinishReason

_COMMENT: Final = b":"
_MARK_AT: Final = b"\n" + MARK
_BUSY: Final = 429
_AWAY: Final = 503
_OF_PROXIES: Final = (502, 503, 504)

PROOF_S: Final = 0.05
"""A connection that breaks sooner after a request was sent may be that of a proxy that has no router behind it."""

LONGEST_READ_S: Final = 15.0
"""A router that is lost later than this after a request was sent has read it: its supervisor ends it sooner."""

Verdict: TypeAlias = Literal["take", "again", "end"]
"""What is to become of a response: its client gets it, it is asked for again, or it ends a stream that has begun."""


class HeldCall:
    """What is known of one request, whichever routers it was sent to. Time is passed in."""

    def __init__(self, content: bytes, retry_policy: RetryPolicy, now: float) -> None:
        self._content = content
        self._retry_policy = retry_policy
        self._began_at = now
        self._attempt = 0
        self._sent_at = now
        self._buffer = b""
        self.noted: Noted | None = None
        """Of a stream that has begun."""
        self.failed: Failed | None = None
        """How a router has ended the stream."""

    @property
    def is_over(self) -> bool:
        """The client has the whole stream."""
        return self.noted is not None and self.noted.is_over

    # --- out ---

    def submission(self, now: float) -> tuple[dict[str, str], bytes]:
        """Headers and body of the next submission."""
        self._attempt += 1
        self._buffer, self.failed, self._sent_at = b"", None, now
        self._retry_policy.note_sent()
        headers = {HOLD: str(self._attempt)}
        if num_lost := self._retry_policy.num_routers_lost:
            headers[ROUTERS_LOST] = str(num_lost)
        if self.noted is None:
            return headers, self._content
        self.noted.age_s = now - self._began_at
        noted = self.noted.content
        return headers | {RESUME: str(len(noted))}, self._content + noted

    # --- in ---

    def verdict(self, status: int, hold: str | None, should_retry: str | None) -> Verdict:
        """On a response, by its status and what it says of itself. `hold` is None where no Holdfast router answers."""
        has_begun = self.noted is not None
        if status == 200:
            if hold is None and has_begun:
                return "again"  # a stranger cannot go on with it
            self._retry_policy.note_taken()
            if not has_begun and hold is not None and (identity := Identity.of(hold)) is not None:
                self.noted = Noted(identity=identity)
            return "take"
        if hold is None:
            return "again" if has_begun and status in _OF_PROXIES else self._refused()
        may_retry = should_retry == "true"
        is_away = status == _AWAY or (status == _BUSY and self._retry_policy.was_taken)
        return "again" if may_retry and is_away else self._refused()

    def _refused(self) -> Verdict:
        return "take" if self.noted is None else "end"

    def push(self, data: bytes) -> bytes:
        """What the client is to get after some bytes of a stream: all events up to the last mark, and no mark."""
        assert self.noted is not None, "a stream has begun"
        self._buffer = self._buffer + data if self._buffer else data
        handed = []
        while (end := self._one_mark()) is not None:
            handed.append(end)
        return b"".join(handed)

    def _one_mark(self) -> bytes | None:
        """The events before the next mark, which is noted; None if it has not come yet."""
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
        events, said = self._buffer[:at], json.loads(self._buffer[at + len(MARK) : end])
        self._buffer = self._buffer[end + 2 :]
        if "failed" in said:
            self.failed = Failed(events, said["failed"], said["after"])
            return b""
        assert self.noted is not None, "a stream has begun"
        self.noted.note(said)
        self._retry_policy.note_news()
        return events

    def _drop_comment(self) -> None:
        """A comment of a stream that waits stands alone."""
        end = self._buffer.find(b"\n\n")
        if self._buffer.startswith(_COMMENT) and 0 <= end == len(self._buffer) - 2:
            self._buffer = b""

    def note_lost(self, now: float, *, was_sent: bool) -> None:
        """The connection is gone; where the request `was_sent`, a router may have been reading it."""
        if was_sent:
            is_proof = PROOF_S <= now - self._sent_at < LONGEST_READ_S
            self._retry_policy.note_router_lost(is_proof=is_proof)

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """How long to wait before the next submission; None: give up."""
        return self._retry_policy.pause_s(now, hint_s)


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a router has ended a stream with."""

    events: bytes
    """That say it to the client."""
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


@dataclass(slots=True)
class ReceivedSequence:
    """What has arrived of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    finish_reason: FinishReason | None = None
    """Set once its end has come."""


class Received:
    """What has arrived of one stream, whichever routers it came from."""

    def __init__(self) -> None:
        self.sequences: list[ReceivedSequence] = []
        """By sequence index."""
        self.fingerprint = ""
        self.is_over = False
        """The very last chunk has come, which says the usage: all that may be missing is the end of the call."""
        self._replayed_without_guarantee = False

    @property
    def resume(self) -> Resume:
        """For the router that is to go on with it."""
        sequences = tuple(
            Progress(
                token_ids=tuple(sequence.token_ids),
                text_length=sequence.text_length,
                finish_reason=sequence.finish_reason,
            )
            for sequence in self.sequences
        )
        return Resume(sequences=sequences, fingerprint=self.fingerprint)

    def take(self, chunk: Chunk) -> Chunk | None:
        """Notes a chunk, and returns it with what is known from earlier ones; None if its sequence was over before.

        Raises `InternalError` for a gap or an overlap.
        """
        while len(self.sequences) <= chunk.sequence_index:
            self.sequences.append(ReceivedSequence())
        if chunk.usage is not None:
            self.is_over = True
        sequence = self.sequences[chunk.sequence_index]
        if sequence.finish_reason is not None:
            return None
        if chunk.first_token_index != len(sequence.token_ids):
            place = f"at token {chunk.first_token_index}, not {len(sequence.token_ids)}"
            raise InternalError(f"sequence {chunk.sequence_index} does not continue where it was cut off: {place}")
        sequence.token_ids += chunk.token_ids
        sequence.text_length += len(chunk.text)
        sequence.finish_reason = chunk.finish_reason
        self.fingerprint = chunk.system_fingerprint
        if chunk.replayed_without_guarantee == self._replayed_without_guarantee:
            return chunk
        self._replayed_without_guarantee = True
        return replace(chunk, replayed_without_guarantee=True)
