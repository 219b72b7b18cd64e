"""Records of benchmarks: what is kept, and that a page shows each record with its command and commit."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import RESULTS

ROOT = Path(__file__).parents[2]
TEXTS = [page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
PROGRAM = """
import json, os, sys
print("a table")
if "--fail" in sys.argv:
    sys.exit(3)
figures = {"ratio": 1.5, "at": [sys.argv[-1], os.path.expanduser("~/S")]}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(figures))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_benchmark.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_benchmark"


def test_a_record_has_command_commit_load_and_figures(module, tmp_path):
    path = record.record("some", module, ["--rounds", "2"], tmp_path / "results")
    kept = json.loads(path.read_text())
    assert kept["command"] == f"python -m {module} --rounds 2"
    assert kept["printed"] == ["a table"]
    assert kept["figures"] == {"ratio": 1.5, "at": ["figures.json", "~/S"]}  # no path of this machine
    assert len(kept["load"]) == 2
    assert kept["machine"]["cores"] > 0
    assert kept["commit"]


def test_a_benchmark_that_fails_is_not_recorded(module, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        record.record("some", module, ["--fail"], tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_every_record_is_shown_with_its_command_and_commit():
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        pages = [text for text in TEXTS if f"benchmarks/results/{path.name}" in text]
        assert pages, f"no page links {path.name}"
        assert any(kept["command"] in text and kept["commit"][:8] in text for text in pages), path.name
