"""Figures of several systems in rounds: medians, spread, and ratios within a round, as a table."""

import statistics
from collections import defaultdict

from rich.table import Table


class Figures:
    """One value a round for each column of each row."""

    def __init__(self, *columns: str, beside: str = "", of: str = "") -> None:
        """With `beside`, the name of a row, another column has ratios to it of the column `of`."""
        self._columns = columns
        self._beside = beside
        self._of = of
        self.values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def note(self, row: str, column: str, value: float) -> None:
        self.values[row][column].append(value)

    def table(self) -> Table:
        table = Table("system", *self._columns, *([f"to {self._beside}"] if self._beside else []))
        for row, values in self.values.items():
            cells = [spread(values[column]) if values.get(column) else "" for column in self._columns]
            table.add_row(row, *cells, *([self._ratio(row)] if self._beside else []))
        return table

    def _ratio(self, row: str) -> str:
        mine, theirs = self.values[row].get(self._of, []), self.values[self._beside].get(self._of, [])
        if row == self._beside or not mine or len(mine) != len(theirs):
            return ""
        return spread([one / other for one, other in zip(mine, theirs, strict=True)])


def spread(values: list[float]) -> str:
    """The median, and the least and the most."""
    digits = 0 if statistics.median(values) >= 20 else 1 if statistics.median(values) >= 2 else 2
    median, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} [{least}..{most}]"
