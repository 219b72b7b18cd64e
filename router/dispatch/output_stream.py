"""Output buffer of one sequence, between the dispatch host and the sink of its request. A pure core.

Output that the sink does not take waits for its reader, and is merged into one delivery: a slow reader delays nobody.
The buffer is bounded by the request's own output, and where there is a limit (`UnreadLimit`), its request is suspended
soon after the buffer has exceeded that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.events import OutputDelta
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import SequenceKey, TokenLogprob

BEHIND_AT_LEAST_S: Final = 1.0
"""A reader that is behind for less may be held up by its own event loop, and is not called slow."""

MERGED_AT: Final = 64
"""This many unfetched deliveries are merged into one, because each costs more memory than its tokens."""


class Sink(Protocol):
    """Where the output of a request goes. Both methods run inside the dispatch host, and must not call back into it."""

    def take(self, delta: OutputDelta, /) -> bool:
        """Takes what comes before the end of a sequence of which nothing waits. False is back pressure: the delta
        waits to be polled.
        """

    def notify(self) -> None:
        """There is something to poll: output that was not taken, or an end. It must only wake the reader, not read."""


class WakingSink:
    """Takes nothing, and calls `on_output` when there is something to poll."""

    def __init__(self, on_output: Callable[[], None]) -> None:
        self.notify = on_output

    def take(self, delta: OutputDelta, /) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLimit:
    """When a stream's reader is too far behind for its request to keep a replica, and who is told."""

    num_tokens: int
    """That wait for a reader which has been behind for `BEHIND_AT_LEAST_S`."""
    on_unread: Callable[["OutputStream"], None]
    """Called at each delivery from there on. It runs inside the dispatch host, and must not call back into it."""
    on_read: Callable[["OutputStream"], None]
    """Called once a stream that `is_suspended` has been read to its last token. It runs in the reader."""


class OutputStream:
    """Filled by `push` and `fail`, emptied by the sink or by `poll`."""

    __slots__ = (
        "_behind_since",
        "_limit",
        "_now",
        "_pending",
        "_sink",
        "behind_s",
        "echo",
        "error",
        "index",
        "is_suspended",
        "key",
        "notifies_each_step",
        "num_tokens",
        "num_unread",
        "timeline",
        "watch",
    )

    def __init__(
        self,
        key: SequenceKey,
        sink: Sink,
        now: Callable[[], float] = lambda: 0.0,
        limit: UnreadLimit | None = None,
    ) -> None:
        """`now` is asked when the reader falls behind and when it has caught up, and not for each delivery."""
        self.key = key
        self._limit = limit
        self.num_unread = 0
        """Tokens that wait for the reader."""
        self.is_suspended = False
        """No replica runs its request, since they do; set by `on_unread`."""
        self.timeline = Timeline()
        """Of its request; the dispatcher fills it."""
        self.behind_s = 0.0
        """Seconds in which more waited for the reader than it was told of last, and in which the end waited for it."""
        self._now = now
        self._behind_since: float | None = None
        self.notifies_each_step = True
        """False: the sink is notified at the end only."""
        self._sink = sink
        self.index = 0
        """The sequence's number in its request."""
        self.echo = ""
        """Comes before its text."""
        self._pending: list[OutputDelta] = []
        self.watch: Callable[[OutputDelta], None] | None = None
        """Is told of what comes up to the first token, and of the last delivery."""
        self.num_tokens = 0
        """Delivered so far."""
        self.error: HoldfastError | None = None
        """What has ended it, and is raised after all earlier output."""

    def push(self, delivery: OutputDelta) -> None:
        is_last = delivery.finish_reason is not None
        if self.watch is not None and (is_last or not self.num_tokens):
            self.watch(delivery)
        self.num_tokens += len(delivery.token_ids)
        offered = self._of_request(delivery) if self.index or self.echo else delivery
        if not (self._pending or is_last) and self._sink.take(offered):
            return
        if self._behind_since is None and (is_last or (self._pending and self.notifies_each_step)):
            self._behind_since = self._now()
        self._pending.append(delivery)
        self.num_unread += len(delivery.token_ids)
        if self._limit is not None and not is_last and self.num_unread >= self._limit.num_tokens:
            self._check_reader(self._limit)
        if self.notifies_each_step or is_last:
            self._sink.notify()
        elif len(self._pending) >= MERGED_AT:
            self._pending = [merged(self._pending)]

    def fail(self, error: HoldfastError) -> None:
        """Ends the stream with an error, which is raised to the reader after all earlier output."""
        self.error = error
        self._sink.notify()

    def poll(self) -> OutputDelta | None:
        """All output since the last call, if any. After it, raises the error given to `fail`."""
        if not self._pending:
            if self.error is not None:
                raise self.error.with_traceback(None)  # one error may end many streams
            return None
        delivery = self._of_request(self._first())
        if self._behind_since is not None:
            self.behind_s += self._now() - self._behind_since
            self._behind_since = None
        self.num_unread -= len(delivery.token_ids)
        if self.is_suspended and not self._pending and self._limit is not None:
            self.is_suspended = False
            self._limit.on_read(self)
        return delivery

    def _of_request(self, delivery: OutputDelta) -> OutputDelta:
        if self.index:
            delivery = delivery._replace(sequence_index=self.index)
        if self.echo and delivery.first_token_index == 0:
            delivery = delivery._replace(text=self.echo + delivery.text)
        return delivery

    def _check_reader(self, limit: UnreadLimit) -> None:
        """A reader that waits for the end is never behind."""
        since = self._behind_since
        if since is not None and not self.is_suspended and self._now() - since >= BEHIND_AT_LEAST_S:
            limit.on_unread(self)

    def _first(self) -> OutputDelta:
        """All that waits, as far as one replica has made it."""
        pending = self._pending
        if pending[0].replica_id == pending[-1].replica_id:
            self._pending = []
            return merged(pending)
        count = next(at for at, one in enumerate(pending) if one.replica_id != pending[0].replica_id)
        self._pending = pending[count:]
        return merged(pending[:count])

    @property
    def has_more(self) -> bool:
        """Whether there is more to poll at once."""
        return bool(self._pending) or self.error is not None


def merged(deliveries: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deliveries as one, of the last one's replica."""
    first, last = deliveries[0], deliveries[-1]
    if len(deliveries) == 1:
        return first
    token_ids, texts, logprobs = list[int](), list[str](), list[TokenLogprob]()
    for delivery in deliveries:
        token_ids += delivery.token_ids
        texts.append(delivery.text)
        logprobs += delivery.logprobs
    return last._replace(
        first_token_index=first.first_token_index,
        prompt_logprobs=first.prompt_logprobs,
        token_ids=tuple(token_ids),
        text="".join(texts),
        logprobs=tuple(logprobs),
    )
