"""Terminal output of completions: texts on stdout, everything about them on stderr."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holdfast.worker.request import TokenLogprob


class WholeCompletion(Protocol):
    """The shown form of a finished completion."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def cumulative_logprob(self) -> float | None: ...


class Printer:
    """Prints a text as it grows, or several that are complete, and keeps the time."""

    def __init__(self) -> None:
        self.text = ""
        self._started_s = time.perf_counter()
        self._first_s = 0.0
        self._num_tokens = 0

    def add(self, text: str, num_tokens: int) -> None:
        """`text` is new, and so are `num_tokens` tokens."""
        if not self._num_tokens:
            self._first_s = time.perf_counter() - self._started_s
        self._num_tokens += num_tokens
        self.text += text
        print(text, end="", flush=True)

    def finish(self, reason: str) -> None:
        total_s = time.perf_counter() - self._started_s
        print(flush=True)
        speed = f"{self._num_tokens / total_s:.0f} tokens/s, first after {1000 * self._first_s:.0f} ms"
        print(f"{self._num_tokens} tokens in {total_s:.2f} s, {speed}, ended by {reason}", file=sys.stderr)

    def show(self, completions: Sequence[WholeCompletion]) -> None:
        """Each text after its number, and a line on each."""
        total_s = time.perf_counter() - self._started_s
        for index, completion in enumerate(completions):
            print(f"[{index}] {completion.text}", flush=True)
        for index, completion in enumerate(completions):
            known = completion.cumulative_logprob
            likely = "" if known is None else f", log-probability {known:.3f}"
            ending = f"{len(completion.token_ids)} tokens, ended by {completion.finish_reason}{likely}"
            print(f"[{index}] {ending}", file=sys.stderr)
        print(f"{len(completions)} completions in {total_s:.2f} s", file=sys.stderr)


def print_logprobs(title: str, items: "Sequence[TokenLogprob | None]", text_of: Callable[[int], str]) -> None:
    """A table on stderr, a row for each token: how likely it was, and the best ones at its place.

    `text_of` gives a token id's text. None stands for a token of which nothing can be said.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("#", "token", "logprob", "rank", "best", title=title, title_justify="left")
    for index, item in enumerate(items):
        if item is None:
            table.add_row(str(index), "", "", "", "")
            continue
        best = "  ".join(f"{_quoted(token_id, text_of)} {logprob:.2f}" for token_id, logprob in item.top)
        row = (str(index), _quoted(item.token_id, text_of), f"{item.logprob:.3f}", str(item.rank), best)
        table.add_row(*row)
    Console(stderr=True, markup=False, highlight=False).print(table)


def _quoted(token_id: int, text_of: Callable[[int], str]) -> str:
    """A special token that has no text is shown by its id."""
    text = text_of(token_id)
    return repr(text) if text else f"<{token_id}>"
