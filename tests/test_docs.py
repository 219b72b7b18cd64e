"""What the documentation says can be typed, can be typed; what it points to is there."""

import re
import shlex
from pathlib import Path

import pytest

from holdfast.cluster.commands.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
FOLDERS = ("worker", "router", "cluster", "proto", "tests", "docs", "benchmarks", "scripts")


def mentions(pattern: str) -> set[str]:
    return {found for text in TEXT.values() for found in re.findall(pattern, text, re.MULTILINE)}


def test_the_files_that_are_named_exist():
    named = mentions(rf"\b((?:{'|'.join(FOLDERS)})/[\w/.-]*\w)")
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_links_between_pages_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\((?!https?://)([^)#]+)", TEXT[page.name])
        assert not [link for link in links if not (page.parent / link).exists()], page.name


def test_the_verbs_of_make_exist():
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert mentions(r"(?:^ +|`)make ([a-z-]+)") <= verbs


@pytest.mark.parametrize("line", sorted(mentions(r"^ +(?:\.venv/bin/)?holdfast (.+)$")))
def test_the_commands_parse(line):
    app.parse_args(shlex.split(line, comments=True), exit_on_error=False, print_error=False)


def test_the_readmes_program_prints_what_it_promises(capsys):
    program = re.search(r"```python\n(.*?)```", TEXT["README.md"], re.DOTALL).group(1)
    exec(compile(program, "README.md", "exec"), {})
    assert "The capital of France is Paris" in capsys.readouterr().out
