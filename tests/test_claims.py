"""The table of claims: each figure stands on its page, each command exists with its options, and no measurement is left
out.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from holdfast.cluster.commands.cli import app

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "claims.md"
ROW = re.compile(
    r"^\| (?P<claim>[^|]+) \| `(?P<figure>[^|]+?)` \| \[.*?\]\((?P<page>.+?)\) \| `(?P<command>[^|]+?)` \| [^|]+ \|$"
)
ROWS = [row for line in PAGE.read_text().splitlines() if (row := ROW.match(line))]

MEASURED = re.compile(
    r"AMD EPYC|Intel Xeon|\b(?:virtual|quiet) cores|\bload (?:of |under )?\d|\b20\d\d-\d\d-\d\d\b"
    r"|\b\d+ [A-Z][a-z]+ 20\d\d\b|\bcommit [0-9a-f]{8}\b"
)
"""Words by which a section says where and when its figures were measured."""
NO_FIGURES = {("performance.md", "# Performance")}  # the table of machines


def plain(text: str) -> str:
    return " ".join(text.split())


def test_every_row_is_read():
    assert len(ROWS) == PAGE.read_text().count("\n| ") - 1 > 20


def test_every_figure_stands_on_its_page():
    pages = {name: plain((PAGE.parent / name).read_text()) for name in {row["page"] for row in ROWS}}
    assert [row["claim"] for row in ROWS if row["figure"] not in pages[row["page"]]] == []


def sections(text: str) -> list[str]:
    """Parts from one heading to the next; a comment in a block of code is no heading."""
    outside = re.sub(r"^```.*?^```", lambda block: block[0].replace("\n#", "\n "), text, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"^(?=#+ )", outside, flags=re.MULTILINE)


def without_a_claim(page: Path, rows: list[re.Match[str]]) -> list[str]:
    """Headings of the page's sections that tell a measurement of which no row has a figure."""
    figures = [row["figure"] for row in rows if (PAGE.parent / row["page"]).resolve() == page]
    measured = [one for one in sections(page.read_text()) if MEASURED.search(re.sub("`[^`]*`", "", one))]
    headings = [one.splitlines()[0] for one in measured if not any(figure in plain(one) for figure in figures)]
    return [heading for heading in headings if (page.name, heading) not in NO_FIGURES]


def test_every_measurement_has_a_row():
    pages = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {PAGE})]
    assert {page.name: headings for page in pages if (headings := without_a_claim(page, ROWS))} == {}


def test_a_measurement_without_a_row_is_found():
    page = ROOT / "docs" / "failover.md"
    assert without_a_claim(page, [row for row in ROWS if row["figure"] != "46.2"]) == ["## A whole day"]


def test_the_comparison_quotes_the_performance_page():
    rows = [line for line in (ROOT / "docs/comparison.md").read_text().splitlines() if line.startswith("| ")]
    figures = {figure for row in rows for figure in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", row)}
    performance = (ROOT / "docs/performance.md").read_text()
    assert len(figures) > 20
    assert [figure for figure in sorted(figures) if figure not in performance] == []


def problem_of(command: str) -> str:
    """Why it cannot be run; empty: it can."""
    program, *words = shlex.split(command)
    if program == "holdfast":
        app.parse_args(words, exit_on_error=False, print_error=False)
        return ""
    if program == "pytest":
        missing = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
        return f"no such file: {missing}" if missing else ""
    if "--" in words:  # a benchmark that is run by another one: its options follow
        mark = words.index("--")
        inner = next(word for word in words[2:mark] if word.startswith("benchmarks."))
        return problem_of(shlex.join([program, *words[:mark]])) or problem_of(
            shlex.join([program, "-m", inner, *words[mark + 1 :]])
        )
    spec = importlib.util.find_spec(words[1]) if words[:1] == ["-m"] else None
    if spec is None or spec.origin is None:
        return f"no such module: {words}"
    source = Path(spec.origin).read_text()
    missing = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source]
    return f"no such options: {missing}" if missing else ""


def test_every_command_exists():
    commands = sorted({row["command"] for row in ROWS})
    assert {command: problem for command in commands if (problem := problem_of(command))} == {}


def test_commands_that_do_not_exist_are_found():
    assert problem_of("python -m benchmarks.no_such_thing")
    assert problem_of("python -m benchmarks.routing --no-such-option 3")
    assert problem_of("python -m benchmarks.two_trees OTHER benchmarks.router -- --no-such-option 3")
    assert problem_of("pytest tests/no_such_file.py")
    with pytest.raises(Exception, match="no-such-command"):
        problem_of("holdfast no-such-command")
