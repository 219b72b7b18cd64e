"""The output of one request on its way to one reader. A pure core: who reads, and how it waits, is another's business.

What the reader has not fetched yet is merged into one delivery, so a slow reader holds up nobody, and what is kept for
it is bounded by what the request may produce at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from holdfast.router.events import Deliver
from holdfast.worker.errors import HoldfastError

MERGED_AT: Final = 64
"""So many deliveries that nobody has fetched become one: they are larger than what they say."""


class OutputStream:
    """Filled by `push` and `fail`, emptied by `poll`. `on_output` is called whenever there is something to poll.

    It is called in the midst of other work, so it takes note, and does not read by itself.
    """

    def __init__(self, request_id: str, on_output: Callable[[], None]) -> None:
        self.request_id = request_id
        self.notifies_each_step = True
        """False: its reader wants to hear of the end alone."""
        self._on_news = on_output
        self._pending: list[Deliver] = []
        self._error: HoldfastError | None = None

    def push(self, delivery: Deliver) -> None:
        self._pending.append(delivery)
        if self.notifies_each_step or delivery.finish_reason is not None:
            self._on_news()
        elif len(self._pending) >= MERGED_AT:
            self._pending = [merged(self._pending)]

    def fail(self, error: HoldfastError) -> None:
        """The last word: raised to the reader after what was pushed before."""
        self._error = error
        self._on_news()

    def poll(self) -> Deliver | None:
        """What has come since the last time, if anything. Raises what `fail` was given."""
        if self._pending:
            pending, self._pending = self._pending, []
            return merged(pending)
        if self._error is not None:
            raise self._error.with_traceback(None)  # one error may end many streams
        return None


def merged(deliveries: Sequence[Deliver]) -> Deliver:
    """Deliveries that follow each other, as one."""
    first, last = deliveries[0], deliveries[-1]
    if len(deliveries) == 1:
        return first
    return replace(
        last,
        first_token_index=first.first_token_index,
        prompt_logprobs=first.prompt_logprobs,
        token_ids=tuple(token_id for delivery in deliveries for token_id in delivery.token_ids),
        text="".join(delivery.text for delivery in deliveries),
        logprobs=tuple(item for delivery in deliveries for item in delivery.logprobs),
    )
