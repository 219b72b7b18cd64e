"""Known differences: tests of others that cannot pass here, and why. `--check` only compares docs/vllm.md with them.

    python -m scripts.vllm_suite.differences [--check]

`differences.txt` has one in each line: the beginning of a test's name (`*`: anything), ` -> `, the reason.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.generated_file import keep

FILE: Final = Path(__file__).with_name("differences.txt")
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
HEADER: Final = "| test | why it fails here |\n|---|---|\n"


@dataclass(frozen=True, slots=True)
class Difference:
    """Tests whose names begin with `beginning` are not expected to pass."""

    beginning: str
    why: str


def read(path: Path = FILE) -> list[Difference]:
    """The longest beginnings first. Raises ValueError for a line that says no reason."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        beginning, arrow, why = (part.strip() for part in line.partition(" -> "))
        if not (beginning and arrow and why):
            raise ValueError(f"{path.name}:{number} must be `test -> reason`, not {line!r}")
        found.append(Difference(beginning, why))
    return sorted(found, key=lambda one: (-len(one.beginning), one.beginning))


def difference_of(test: str, differences: Iterable[Difference]) -> Difference | None:
    """The one that a test falls under, of those sorted as `read` gives them."""
    return next((one for one in differences if _form(one.beginning).match(test)), None)


def _form(beginning: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, beginning.split("*"))))


def table(differences: Iterable[Difference]) -> str:
    """By suite and file."""
    rows = sorted(differences, key=lambda one: one.beginning)
    return HEADER + "".join(f"| `{one.beginning}` | {one.why} |\n" for one in rows)


def with_table(page: str, new: str) -> str:
    """The page with its table replaced."""
    before, header, rest = page.partition(HEADER)
    if not header:
        raise SystemExit(f"{PAGE}: has no table that begins with {HEADER.splitlines()[0]}")
    rows = rest.splitlines(keepends=True)
    after = next((number for number, row in enumerate(rows) if not row.startswith("|")), len(rows))
    return before + new + "".join(rows[after:])


def main() -> None:
    fresh = with_table(PAGE.read_text(encoding="utf-8"), table(read()))
    keep(PAGE, fresh, "list of differences", "scripts.vllm_suite.differences")


if __name__ == "__main__":
    main()
