"""One client's call: the completions that it asks for, opened together and read as one. A pure core.

What may live here: all of them or none, and the words of siblings as the words of their request. What may not: how the
reader waits (`answer.py`), wire formats, decisions.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.output_stream import OutputStream
from holdfast.router.dispatch.parallel_sampling import merged_usage
from holdfast.router.events import Deliver, Usage
from holdfast.router.resume import NewSequence, final_delivery
from holdfast.worker.errors import RequestAbortedError

STOPPED_RETRY_S: Final = 1.0


class Call:
    """The streams of a request's siblings as one, for one reader. Whoever opens a call closes it."""

    def __init__(
        self, request_id: str, streams: Sequence[OutputStream], close: Callable[[], None], echo: str = ""
    ) -> None:
        self.request_id = request_id
        self.num_completions = len(streams)
        self.close = close
        """Cancels what has not ended. Nothing is read after it."""
        self._echo = echo
        self._streams = dict(enumerate(streams))
        """Those that have not ended. The one that was read last is at the end."""
        self._usages: list[Usage] = []

    @property
    def is_over(self) -> bool:
        """Every completion has been read to its end."""
        return not self._streams

    @property
    def usage(self) -> Usage:
        """What the completions that have ended cost together."""
        return merged_usage(self._usages)

    def await_ends(self) -> None:
        """From here on the reader is told of a completion's end alone, which spares it to be woken by every step."""
        for stream in self._streams.values():
            stream.notifies_each_step = False

    def poll(self) -> Deliver | None:
        """News of one completion, if there is any; completions take turns.

        They are told apart by `sequence_index`, and the usage is on the very last delivery. Raises what ended one of
        them with an error, which ends them all.
        """
        for index, stream in self._streams.items():
            delivery = stream.poll()
            if delivery is not None:
                del self._streams[index]
                if delivery.finish_reason is None:
                    self._streams[index] = stream
                return self._told(index, delivery)
        return None

    def _told(self, index: int, delivery: Deliver) -> Deliver:
        """A sibling's delivery in the words of the request."""
        if delivery.usage is not None:
            self._usages.append(delivery.usage)
        echo = self._echo if delivery.first_token_index == 0 else ""
        if self.num_completions == 1 and not echo and delivery.request_id == self.request_id:
            return delivery
        return replace(
            delivery,
            request_id=self.request_id,
            sequence_index=index,
            text=echo + delivery.text,
            usage=None if self._streams else self.usage,
        )


def open_call(
    dispatch_host: DispatchHost,
    request_id: str,
    sequences: Sequence[NewSequence],
    *,
    model: str,
    deadline: float,
    on_output: Callable[[], None],
    client_attempt: int = 0,
    echo: str = "",
) -> Call:
    """Opens all sequences of a request, or none. Raises what `DispatchHost.open` raises.

    `on_output` is that of the call's streams. `echo` comes before the text of each completion.
    """
    streams = []
    with ExitStack() as opened:
        for sequence in sequences:
            if sequence.caught_up.finish_reason is not None:
                stream = OutputStream(sequence.request.request_id, on_output)
                stream.push(final_delivery(sequence.request, sequence.caught_up))
            else:
                stream = dispatch_host.open(
                    sequence, model=model, deadline=deadline, client_attempt=client_attempt, on_output=on_output
                )
                opened.callback(dispatch_host.close, stream)
            streams.append(stream)
        return Call(request_id, streams, opened.pop_all().close, echo)


def stopping() -> RequestAbortedError:
    """What callers of a router that stops are told. They may come again: by then another may have its place."""
    error = RequestAbortedError("this router is stopping")
    error.retry_after_s = STOPPED_RETRY_S
    return error
