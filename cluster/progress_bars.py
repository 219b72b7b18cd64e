"""Progress display of a start-up: bars on a terminal, one plain line per phase otherwise. Always on stderr.

Everything that takes time reports through one signature, `report(phase, done, total)`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from holdfast.worker.progress import Report


@contextmanager
def progress(stream: TextIO) -> Iterator[Report]:
    """Shows phases on `stream` until the block ends. The report may be called from any thread."""
    if not stream.isatty():
        yield PlainProgress(stream).report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), BarColumn(bar_width=24))
    with Progress(*columns, TimeElapsedColumn(), console=Console(file=stream)) as bars:
        tasks: dict[str, TaskID] = {}
        ended: set[str] = set()
        lock = threading.Lock()

        def report(phase: str, done: int, total: int) -> None:
            with lock:
                if phase in ended:
                    return
                if phase not in tasks:
                    tasks[phase] = bars.add_task(phase, total=total if total > 1 else None)
                finished = done >= total
                if finished:
                    ended.add(phase)
                bars.update(tasks[phase], completed=done, total=total if finished or total > 1 else None)

        yield report


class PlainProgress:
    """A line when a phase begins and a line when it ends, with the seconds it took."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._started_s: dict[str, float] = {}
        self._ended: set[str] = set()
        self._lock = threading.Lock()

    def report(self, phase: str, done: int, total: int) -> None:
        """Prints a line when a phase begins, and one when `done` has reached `total`."""
        with self._lock:
            if phase in self._ended:
                return
            if phase not in self._started_s:
                self._started_s[phase] = self._clock()
                if done < total:
                    self._say(f"{phase} ...")
            if done >= total:
                self._ended.add(phase)
                self._say(f"{phase}: done in {self._clock() - self._started_s[phase]:.1f} s")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
