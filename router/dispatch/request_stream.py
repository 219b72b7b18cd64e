"""The stream of one request: its sequences, opened together and read as one. A pure core."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.output_stream import OutputStream, Sink
from holdfast.router.dispatch.parallel_sampling import merged_usage
from holdfast.router.events import OutputDelta, Usage
from holdfast.router.resume import NewSequence, final_delivery
from holdfast.worker.errors import HoldfastError, RequestAbortedError

STOPPED_RETRY_S: Final = 1.0


class RequestStream:
    """The output streams of a request's siblings as one, for one reader. Whoever opens it closes it."""

    def __init__(
        self,
        request_id: str,
        streams: Sequence[OutputStream],
        close: Callable[[], None],
        abort: Callable[[OutputStream], bool] = lambda stream: False,
        fail: Callable[[OutputStream, HoldfastError], bool] = lambda stream, error: False,
    ) -> None:
        self.request_id = request_id
        self.num_completions = len(streams)
        self.streams = tuple(streams)
        """Of all its sequences, those that have ended too."""
        self.close = close
        """Cancels what has not ended. Nothing is read after it."""
        self._abort = abort
        self._fail = fail
        self._streams = dict(enumerate(streams))
        """Streams that have not ended. The one that was read last is at the end."""
        self._usages: list[Usage] = []
        self.is_over = not streams
        """Every sequence has been read to its end."""
        self.has_more = False
        """After `poll` has returned output: whether there may be more to poll at once."""

    @property
    def usage(self) -> Usage:
        """The usage of all sequences that have ended."""
        return merged_usage(self._usages)

    def abort(self) -> bool:
        """Ends what has not ended, with finish reason ABORT, for the reader to read. Returns whether there was any."""
        were_open = [self._abort(stream) for stream in self._streams.values()]
        return any(were_open)

    def fail(self, error: HoldfastError) -> None:
        """Ends what has not ended with an error, which the reader gets after what there is."""
        for stream in list(self._streams.values()):
            self._fail(stream, error)

    @property
    def num_unread(self) -> int:
        """Tokens that wait for the reader, of all sequences; none of a reader that waits for their ends."""
        return sum(stream.num_unread for stream in self.streams if stream.notifies_each_step)

    def await_ends(self) -> None:
        """From here on the sink is notified only when a sequence ends, so the reader is not woken by every step."""
        for stream in self._streams.values():
            stream.notifies_each_step = False

    def poll(self) -> OutputDelta | None:
        """New output of one sequence that the sink has not taken, if there is any; sequences take turns.

        `sequence_index` says whose output it is. The last delivery of all has the usage. Raises the error that ended
        one of the sequences: it ends the request.
        """
        for index, stream in self._streams.items():
            delivery = stream.poll()
            if delivery is not None:
                if delivery.finish_reason is not None:
                    del self._streams[index]
                    self.is_over = not self._streams
                elif self.num_completions > 1:
                    self._streams[index] = self._streams.pop(index)
                self.has_more = self.num_completions > 1 or stream.has_more
                if delivery.usage is None:
                    return delivery
                self._usages.append(delivery.usage)
                return delivery._replace(usage=self.usage if self.is_over else None)
        return None


def open_request_stream(
    dispatch_host: DispatchHost,
    request_id: str,
    sequences: Sequence[NewSequence],
    *,
    model: str,
    deadline: float,
    sink: Sink,
    client_attempt: int = 0,
    echo: str = "",
    watch: Callable[[OutputDelta], None] | None = None,
    goes_on: bool = False,
) -> RequestStream:
    """Opens all sequences of one request (at least one), or none. An earlier submission of it ends. Raises what
    `DispatchHost.supersede` and `open` raise.

    With `goes_on` it is a further call of one submission, whose earlier calls are over: a later submission ends it.
    The output of all of them goes to `sink`. `echo` comes before the text of each sequence. `watch` is
    told of every delivery of all of them.
    """
    key = sequences[0].request.key
    if goes_on:
        dispatch_host.dispatch.check_newest(key)
    else:
        dispatch_host.supersede(key, client_attempt)
    streams = []
    with ExitStack() as opened:
        for index, sequence in enumerate(sequences):
            if sequence.caught_up.finish_reason is not None:
                stream = OutputStream(sequence.request.sequence_key, sink)
                stream.push(final_delivery(sequence.request, sequence.caught_up))
            else:
                stream = dispatch_host.open(
                    sequence, model=model, deadline=deadline, client_attempt=client_attempt, sink=sink
                )
                opened.callback(dispatch_host.close, stream)
            stream.watch, stream.index, stream.echo = watch, index, echo
            streams.append(stream)
        return RequestStream(request_id, streams, opened.pop_all().close, dispatch_host.abort, dispatch_host.fail)


def stopping() -> RequestAbortedError:
    """The error for requests to a router that stops. Clients may retry: another router may have its address by then."""
    error = RequestAbortedError("this router is stopping")
    error.retry_after_s = STOPPED_RETRY_S
    return error
