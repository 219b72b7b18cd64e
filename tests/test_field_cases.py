"""Users' cases as a script runs them: what counts as RIGHT, and that nothing else does."""

import sys
from pathlib import Path

import pytest

from scripts import field_cases
from scripts.field_cases import GONE, RIGHT, WRONG, Cases, judged


@pytest.mark.parametrize(
    ("case", "code", "output", "verdict"),
    [
        ("http/01_a", 0, "RIGHT: fine\n", RIGHT),
        ("vllm/01_a", 0, "a warning\nright []\n", RIGHT),
        ("http/01_a", 1, "WRONG: the word None", WRONG),
        ("http/01_a", 1, "RIGHT: but it ended badly", WRONG),
        ("http/01_a", 0, "WRONG: but it ended well", WRONG),
        ("http/01_a", 0, "it printed something else", WRONG),
        ("http/01_a", 0, "", WRONG),
        ("http/01_a", None, "RIGHT: and then it hung", WRONG),
        ("http/01_a", 1, "Traceback ...\nKeyError: 'tokens'", WRONG),
        ("core/01_a", 1, "ImportError: cannot import name 'Meeting' from 'holdfast.worker'", GONE),
        ("core/01_a", 1, "AttributeError: 'OpenAnswers' object has no attribute 'belongs'", GONE),
        ("http/01_a", 1, "ModuleNotFoundError: No module named 'numpie'", WRONG),
        ("core/02_events", 0, "[('up', 'm')]", RIGHT),
        ("core/02_events", 0, "[('up', 'm'), ('back', 'm')]", WRONG),
        ("core/07_client", 0, "still retrying after 60 s, 34 submissions", RIGHT),
        ("core/07_client", 0, "still retrying after 3600 s, 2000 submissions", WRONG),
        ("core/99_unknown", 0, "[]", WRONG),
    ],
)
def test_only_what_says_so_is_right(case, code, output, verdict):
    assert judged(case, code, output)[0] == verdict


@pytest.fixture
def cases(tmp_path: Path):
    def make(limit_s: float = 60.0, **sources: str) -> Cases:
        for name, source in sources.items():
            (tmp_path / "core").mkdir(exist_ok=True)
            (tmp_path / "core" / f"{name.removeprefix('case_')}.py").write_text(source)
        return Cases(tmp_path, [], limit_s)

    return make


def test_a_case_is_told_where_the_server_is_and_one_that_hangs_is_ended(cases):
    asked = cases(case_01="import os, sys; print('RIGHT', sys.argv[1], os.environ['HOLDFAST_MODEL'])")
    found = asked.run("core/01", "http://127.0.0.1:1", "smol")
    assert (found.verdict, found.line) == (RIGHT, "RIGHT http://127.0.0.1:1 smol")
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    asked = cases(limit_s=0.3, case_02=hangs.replace("stdin=subprocess.PIPE", "stdin=__import__('os').pipe()[0]"))
    assert asked.run("core/02", "", "").verdict == WRONG


@pytest.mark.slow  # it runs tests
def test_where_a_name_is_gone_the_test_of_the_same_is_run(cases, monkeypatch, tmp_path):
    asked = cases(case_01="from holdfast.worker.errors import Gone")
    for body, verdict in (("assert True", RIGHT), ("assert False", WRONG)):
        (tmp_path / "test_it.py").write_text(f"def test_it(): {body}")
        monkeypatch.setattr(field_cases, "TESTS", {"core/01": str(tmp_path / "test_it.py")})
        found = asked.run("core/01", "", "")
        assert found.verdict == verdict
        assert "ImportError" in found.line


def test_without_a_test_it_cannot_be_run(cases, monkeypatch):
    monkeypatch.setattr(field_cases, "TESTS", {})
    asked = cases(case_01="from holdfast.worker.errors import Gone")
    assert asked.run("core/01", "", "").verdict == GONE


def test_the_command_is_red_unless_all_are_right(cases, monkeypatch, tmp_path, capsys):
    cases(case_01="print('RIGHT')", case_02="print('WRONG'); raise SystemExit(1)")
    for only, code in (("core/01", 0), ("core", 1), ("http", 1)):
        monkeypatch.setattr(sys, "argv", ["field_cases", str(tmp_path), "--only", only])
        assert field_cases.main() == code
    assert "2 cases: 1 RIGHT, 1 WRONG" in capsys.readouterr().out
