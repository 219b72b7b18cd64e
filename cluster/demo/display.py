"""Terminal display of the demo: streams side by side, or line by line where there is no terminal.

What may not live here: the streams (`streams.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cluster.demo.streams import Show, Stream

_LINE_TOKENS: Final = 12
"""Without a terminal, so many tokens make a line."""


@contextmanager
def display(console: Console) -> Iterator[Show]:
    """All streams growing side by side on a terminal; elsewhere, lines with the number of the stream."""
    if not console.is_terminal:
        yield LinePrinter(console).show
        return
    with Live(console=console, refresh_per_second=20, redirect_stdout=False) as live:
        yield lambda streams, _: live.update(_panes(streams))


class LinePrinter:
    """Prints a stream's text by the line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown: dict[int, int] = {}

    def show(self, streams: Sequence[Stream], grown: Stream) -> None:
        num_new = grown.num_tokens - self._num_shown.get(grown.number, 0)
        if num_new >= _LINE_TOKENS or grown.is_finished:
            self._num_shown[grown.number] = grown.num_tokens
            text = " ".join(f"{grown.prompt}{grown.text}".split())
            line = f"[{grown.number}] {grown.num_tokens:3d} tokens: {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _panes(streams: Sequence[Stream]) -> Table:
    table = Table.grid(padding=(0, 1))
    for stream in streams:
        table.add_row(
            Text(f"{stream.number}", style="bold cyan"), Text(stream.prompt) + Text(stream.text, style="green")
        )
    return table


def figures(streams: Sequence[Stream]) -> Table:
    table = Table("stream", "prompt", "tokens", "first token", "per token", "tokens/s", title="over gRPC, all at once")
    for stream in streams:
        table.add_row(
            str(stream.number),
            stream.prompt,
            str(stream.num_tokens),
            f"{1000 * stream.first_token_s:.0f} ms",
            f"{1000 * stream.per_token_s:.1f} ms",
            f"{stream.tokens_per_s:.0f}",
        )
    return table
