"""Output buffer of one sequence, between the dispatch host and one reader. A pure core.

Output that the reader has not fetched is merged into one delivery: a slow reader delays nobody. The buffer is bounded
by the request's own output, and where there is a limit (`UnreadLimit`), its request is suspended soon after the buffer
has exceeded that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.events import OutputDelta
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import SequenceKey, TokenLogprob

BEHIND_AT_LEAST_S: Final = 1.0
"""A reader that is behind for less may be held up by its own event loop, and is not called slow."""

MERGED_AT: Final = 64
"""This many unfetched deliveries are merged into one, because each costs more memory than its tokens."""

Taker: TypeAlias = Callable[[OutputDelta], bool]
"""Takes a delivery straight to its reader. False: it has not, since the reader is busy with an earlier one. It runs
inside the dispatch host, and must not call back into it.
"""


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
    """Filled by `push` and `fail`, emptied by `poll`. `on_output` is called whenever there is something to poll.

    `on_output` runs inside the dispatch host: it must only wake the reader, not read.
    """

    __slots__ = (
        "_behind_since",
        "_limit",
        "_now",
        "_on_output",
        "_pending",
        "behind_s",
        "error",
        "is_suspended",
        "key",
        "notifies_each_step",
        "num_tokens",
        "num_unread",
        "taker",
        "timeline",
        "watch",
    )

    def __init__(
        self,
        key: SequenceKey,
        on_output: Callable[[], None],
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
        """False: `on_output` is called at the end only."""
        self._on_output = on_output
        self._pending: list[OutputDelta] = []
        self.taker: Taker | None = None
        """Is offered what comes before the end while nothing waits to be polled."""
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
        if self.taker is not None and not self._pending and not is_last and self.taker(delivery):
            return
        if self._behind_since is None and (is_last or (self._pending and self.notifies_each_step)):
            self._behind_since = self._now()
        self._pending.append(delivery)
        self.num_unread += len(delivery.token_ids)
        if self._limit is not None and not is_last and self.num_unread >= self._limit.num_tokens:
            self._check_reader(self._limit)
        if self.notifies_each_step or is_last:
            self._on_output()
        elif len(self._pending) >= MERGED_AT:
            self._pending = [merged(self._pending)]

    def fail(self, error: HoldfastError) -> None:
        """Ends the stream with an error, which is raised to the reader after all earlier output."""
        self.error = error
        self._on_output()

    def poll(self) -> OutputDelta | None:
        """All output since the last call, if any. After it, raises the error given to `fail`."""
        if not self._pending:
            if self.error is not None:
                raise self.error.with_traceback(None)  # one error may end many streams
            return None
        delivery = self._first()
        if self._behind_since is not None:
            self.behind_s += self._now() - self._behind_since
            self._behind_since = None
        self.num_unread -= len(delivery.token_ids)
        if self.is_suspended and not self._pending and self._limit is not None:
            self.is_suspended = False
            self._limit.on_read(self)
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
