"""Known differences: tests of others that cannot pass here, and why. `--check` only compares docs/vllm.md with them.

    python -m scripts.vllm_suite.differences [--check]

`differences.txt` has a reason in a line of its own, and below it, indented, the beginnings of the tests' names (`*`:
anything; $: no name goes on there).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.generated_file import keep

FILE: Final = Path(__file__).with_name("differences.txt")
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
HEADER: Final = "| why they fail here | tests |\n|---|---|\n"


@dataclass(frozen=True, slots=True)
class Difference:
    """Tests whose names begin with `beginning` are not expected to pass."""

    beginning: str
    why: str


def read(path: Path = FILE) -> list[Difference]:
    """The longest beginnings first. Raises ValueError for a reason without tests, and tests without a reason."""
    found, why = [], ""
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    for (number, line), (_, after) in zip(entries, [*entries[1:], (0, "")], strict=True):
        if not line[0].isspace():
            why = line.strip()
            if not after[:1].isspace():
                raise ValueError(f"{path.name}:{number} is a reason without tests: {line!r}")
        elif not why:
            raise ValueError(f"{path.name}:{number} has no reason above it: {line!r}")
        else:
            found.append(Difference(line.strip(), why))
    return sorted(found, key=lambda one: (-len(one.beginning), one.beginning))


def difference_of(test: str, differences: Iterable[Difference]) -> Difference | None:
    """The one that a test falls under, of those sorted as `read` gives them."""
    return next((one for one in differences if _form(one.beginning).match(test)), None)


def _form(beginning: str) -> re.Pattern[str]:
    parts = beginning.removesuffix("$").split("*")
    return re.compile(".*".join(map(re.escape, parts)) + ("$" if beginning.endswith("$") else ""))


def table(differences: Iterable[Difference]) -> str:
    """By reason."""
    by_reason: dict[str, list[str]] = {}
    for one in sorted(differences, key=lambda one: one.beginning):
        by_reason.setdefault(one.why, []).append(f"`{one.beginning}`")
    return HEADER + "".join(f"| {why} | {'<br>'.join(tests)} |\n" for why, tests in by_reason.items())


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
