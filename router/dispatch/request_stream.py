"""Output of a request: one buffer for each of its sequences, between the dispatch host and the request's sink, and the
stream that opens them together and reads them as one. A pure core.

Output that the sink does not take is merged into one delta until its reader comes: a slow reader delays no other
request. A buffer is bounded by its sequence's output, and where there is a limit (`UnreadLimit`), its request is
suspended soon after the buffer has exceeded that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.timeline import Timeline
from holdfast.router.generation import OutputDelta, Usage, together
from holdfast.router.resume import final_delta
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineRequest, FinishReason, SequenceKey, TokenLogprob

if TYPE_CHECKING:
    from holdfast.router.dispatch.dispatch_host import DispatchHost

BEHIND_AT_LEAST_S: Final = 1.0
"""A reader that is behind for less may be held up by its own event loop, and is not called slow."""

MERGED_AT: Final = 64
"""This many unfetched deltas are merged into one, because each costs more memory than its tokens."""


class Sink(Protocol):
    """Receiver of a request's output. Both methods run inside the dispatch host, and must not call back into it."""

    def take(self, delta: OutputDelta, /) -> bool:
        """Offers a delta before a sequence's end, if none of the sequence waits. False is back pressure: the delta
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


_NOBODY: Final = WakingSink(lambda: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLimit:
    """When a stream's reader is too far behind for its request to keep a replica, and whom to call."""

    num_tokens: int
    """Tokens that wait for a reader which has been behind for `BEHIND_AT_LEAST_S`."""
    on_unread: Callable[["OutputStream"], None]
    """Called at each delta from there on. It runs inside the dispatch host, and must not call back into it."""
    on_read: Callable[["OutputStream"], None]
    """Called once a stream that `is_suspended` has been read to its last token. It runs in the reader."""


class OutputStream:
    """Output of one sequence. Filled by `push` and `fail`, emptied by the sink or by `poll`."""

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
        timeline: Timeline | None = None,
    ) -> None:
        """`now` is asked when the reader falls behind and when it has caught up, and not for each delta."""
        self.key = key
        self._limit = limit
        self.num_unread = 0
        """Tokens that wait for the reader."""
        self.is_suspended = False
        """No replica runs its request, since they do; set by `on_unread`."""
        self.timeline = timeline or Timeline()
        """Timeline of its sequence; the dispatcher fills it."""
        self.behind_s = 0.0
        """Seconds in which more output waited than the reader had taken, and in which the end waited for it."""
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
        """Called with each delta up to the first token, and with the last delta."""
        self.num_tokens = 0
        """Delivered so far."""
        self.error: HoldfastError | None = None
        """Error that ended it, raised after all earlier output."""

    def push(self, delta: OutputDelta) -> None:
        """Adds a delta; the reader is woken at each step or when enough have gathered. A reader too far behind ends the
        stream.
        """
        is_last = delta.finish_reason is not None
        if self.watch is not None and (is_last or not self.num_tokens):
            self.watch(delta)
        self.num_tokens += len(delta.token_ids)
        offered = self._of_request(delta) if self.index or self.echo else delta
        if not (self._pending or is_last) and self._sink.take(offered):
            return
        if self._behind_since is None and (is_last or (self._pending and self.notifies_each_step)):
            self._behind_since = self._now()
        self._pending.append(delta)
        self.num_unread += len(delta.token_ids)
        if self._limit is not None and not is_last and self.num_unread >= self._limit.num_tokens:
            self._check_reader(self._limit)
        if self.notifies_each_step or is_last:
            self._sink.notify()
        elif len(self._pending) >= MERGED_AT:
            self._pending = [merged(self._pending)]

    def drop_sink(self) -> None:
        """Ends the stream. Earlier output can still be polled, and the sink may be freed."""
        self._sink = _NOBODY

    def fail(self, error: HoldfastError) -> None:
        """Ends the stream with an error, which is raised to the reader after all earlier output."""
        self.error = error
        self._sink.notify()

    def poll(self) -> OutputDelta | None:
        """All output since the last call, if any, up to a change of replica. After it, raises the error given
        to `fail`.
        """
        pending = self._pending
        if not pending:
            if self.error is not None:
                raise self.error.with_traceback(None)  # one error may end many streams
            return None
        count = len(pending)
        if pending[0].replica_id != pending[-1].replica_id:
            count = next(at for at, one in enumerate(pending) if one.replica_id != pending[0].replica_id)
        self._pending = pending[count:]
        delta = merged(pending[:count])
        if self.index or self.echo:
            delta = self._of_request(delta)
        if self._behind_since is not None:
            self.behind_s += self._now() - self._behind_since
            self._behind_since = None
        self.num_unread -= len(delta.token_ids)
        if self.is_suspended and not self._pending and self._limit is not None:
            self.is_suspended = False
            self._limit.on_read(self)
        return delta

    def _of_request(self, delta: OutputDelta) -> OutputDelta:
        if self.index:
            delta = delta._replace(sequence_index=self.index)
        if self.echo and delta.first_token_index == 0:
            delta = delta._replace(text=self.echo + delta.text)
        return delta

    def _check_reader(self, limit: UnreadLimit) -> None:
        """A reader that waits for the end is never behind."""
        since = self._behind_since
        if since is not None and not self.is_suspended and self._now() - since >= BEHIND_AT_LEAST_S:
            limit.on_unread(self)

    @property
    def has_more(self) -> bool:
        """Whether there is more to poll at once."""
        return bool(self._pending) or self.error is not None


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas as one, of the last one's replica."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    token_ids, texts, logprobs = list[int](), list[str](), list[TokenLogprob]()
    for delta in deltas:
        token_ids += delta.token_ids
        texts.append(delta.text)
        logprobs += delta.logprobs
    return last._replace(
        first_token_index=first.first_token_index,
        prompt_logprobs=first.prompt_logprobs,
        token_ids=tuple(token_ids),
        text="".join(texts),
        logprobs=tuple(logprobs),
    )


@dataclass(eq=False, repr=False)
class RequestStream:
    """The output streams of a request's sequences as one, for one reader. Its opener closes it."""

    request: EngineRequest
    streams: list[OutputStream] = field(default_factory=list)
    """Streams of all its sequences by index, ended ones included."""
    _host: "DispatchHost | None" = None
    _usages: list[Usage] = field(default_factory=list)
    _unread: dict[int, OutputStream] = field(default_factory=dict)
    """Streams that were not read to their ends. The most recently read one is at the end."""
    has_more: bool = False
    """After `poll` has returned output: whether there may be more to poll at once."""
    is_over: bool = True
    """Every sequence has been read to its end."""

    def open(
        self,
        host: "DispatchHost",
        sequences: Sequence[RequestState],
        sink: Sink,
        *,
        echo: str = "",
        watch: Callable[[OutputDelta], None] | None = None,
        goes_on: bool = False,
    ) -> None:
        """Opens all sequences of the request (at least one), or none. An earlier submission of it ends. Raises what
        `DispatchHost.supersede` and `open` raise.

        With `goes_on` it is a further call of one submission, whose earlier calls are over: a later submission ends it.
        The output of all sequences goes to `sink`. `echo` comes before the text of each. `watch` is called
        with every delta of all of them.
        """
        if goes_on:
            host.dispatch.check_newest(self.request.key)
        else:
            host.supersede(self.request.key, sequences[0].client_attempt)
        self._host = host
        try:
            for index, state in enumerate(sequences):
                stream = _ended(state, sink) if state.caught_up.finish_reason is not None else host.open(state, sink)
                stream.watch, stream.index, stream.echo = watch, index, echo
                self.streams.append(stream)
                self._unread[index], self.is_over = stream, False
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels open sequences. Ends polling."""
        if self._host is not None:
            for stream in reversed(self.streams):
                self._host.close(stream)
                stream.drop_sink()
                stream.error = None  # its traceback has the frames that have polled it: they would be a cycle

    def abort(self) -> bool:
        """Ends open sequences with finish reason ABORT. Returns whether there was any."""
        host = self._host
        if host is None:
            return False
        were_open = [host.abort(stream) for stream in self._unread.values()]
        return any(were_open)

    def fail(self, error: HoldfastError) -> None:
        """Ends open sequences with an error, which the reader gets after the output so far."""
        if self._host is not None:
            for stream in list(self._unread.values()):
                self._host.fail(stream, error)

    @property
    def usage(self) -> Usage:
        """The usage of all ended sequences: the prompt counts once; its cached tokens are those that were cached for
        all of them.
        """
        first, *others = self._usages
        return together(self._usages, share_prompt=True) if others else first

    @property
    def num_unread(self) -> int:
        """Tokens that wait for the reader, of all sequences; none of a reader that waits for their ends."""
        return sum(stream.num_unread for stream in self.streams if stream.notifies_each_step)

    def poll(self) -> OutputDelta | None:
        """New output of one sequence that the sink has not taken, if there is any; sequences take turns.

        `sequence_index` says whose output it is. The last delta of all has the usage. Raises the error that ended
        one of the sequences: it ends the request.
        """
        is_one = len(self.streams) == 1
        for index, stream in self._unread.items():
            delta = stream.poll()
            if delta is not None:
                if delta.finish_reason is not None:
                    del self._unread[index]
                    self.is_over = not self._unread
                elif not is_one:
                    self._unread[index] = self._unread.pop(index)
                self.has_more = not is_one or (not self.is_over and stream.has_more)
                if delta.usage is None:
                    return delta
                self._usages.append(delta.usage)
                return delta if is_one else delta._replace(usage=self.usage if self.is_over else None)
        return None


def _ended(state: RequestState, sink: Sink) -> OutputStream:
    """The stream of a sequence whose end its client has, or all but its end."""
    stream = OutputStream(state.key, sink)
    delta, reason = final_delta(state.request, state.caught_up), state.caught_up.finish_reason
    stream.push(delta._replace(stop_reason=state.stop_reason) if reason is FinishReason.STOP else delta)
    return stream
