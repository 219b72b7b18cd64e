"""What faults have done to streams: counted for the tests, and shown as a table at the end of the run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tests.chaos.kinds import Answer

HEADER: Final = (
    "fault",
    "times",
    "streams",
    "median pause s",
    "max pause s",
    "found after s",
    "tokens recomputed",
    "lost",
    "doubled",
    "mismatched",
)


@dataclass
class Row:
    """One sort of fault."""

    num_faults: int = 0
    num_streams: int = 0
    """Requests that were open when it happened, or were asked while it lasted."""
    pauses_s: list[float] = field(default_factory=list)
    """From the fault to the next token at the client, of the streams that it held up."""
    found_s: list[float] = field(default_factory=list)
    """From the fault to the moment when a router had given the replica up, where that was looked at."""
    num_recomputed: int = 0
    """Tokens that replicas computed once more to go on where another one had been lost."""
    num_lost: int = 0
    num_doubled: int = 0
    num_mismatched: int = 0
    differences: list[str] = field(default_factory=list)
    """Of the answers that did not match, or did not come."""

    def judge(self, answer: Answer, right: Answer) -> None:
        """Compares an answer with the one of a run without faults."""
        self.num_streams += 1
        self.num_doubled += answer.num_doubled
        if answer.error is not None:
            self.num_lost += 1
            self.differences.append(f"lost: {answer.error!r}")
        elif answer != right:
            self.num_mismatched += 1
            self.differences.append(answer.difference(right))

    @property
    def is_clean(self) -> bool:
        return (self.num_lost, self.num_doubled, self.num_mismatched) == (0, 0, 0)

    def cells(self) -> tuple[str, ...]:
        pauses = (f"{median(self.pauses_s):.2f}", f"{max(self.pauses_s):.2f}") if self.pauses_s else ("-", "-")
        counts = (self.num_recomputed or "-", self.num_lost, self.num_doubled, self.num_mismatched)
        found = f"{median(self.found_s):.2f}" if self.found_s else "-"
        return (str(self.num_faults), str(self.num_streams), *pauses, found, *map(str, counts))


class Tally:
    """All rows of a test run, by what the fault is called."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def row(self, fault: str) -> Row:
        return self._rows.setdefault(fault, Row())

    def add(self, fault: str, row: Row) -> None:
        """A row that another process has counted."""
        self._rows[fault] = row

    def lines(self) -> Iterable[str]:
        """A table, in Markdown; nothing if there were no faults."""
        if not self._rows:
            return
        yield _line(HEADER)
        yield _line(["---"] * len(HEADER))
        for fault, row in self._rows.items():
            yield _line((fault, *row.cells()))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
