"""Every GPU measurement runs here on the CPU, on a tiny model, so that it runs where there is a GPU."""

import json

import pytest
import torch

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import exactness, load, lost_rank, serving, steps, transformers_batching
from benchmarks.gpu.findings import Findings, read, tell

CPU = torch.device("cpu")


def check_load(findings, name):
    first, sustained = findings.rows
    assert first["first token"] == sustained["sustained"] == name
    assert 0 < first["median ms"] <= first["worst ms"]
    assert sustained["requests"] == load.TINY.num_requests
    assert sustained["output tokens/s"] > 0


@pytest.mark.slow  # a benchmark by the interpreter
def test_steps_beside_the_rates_of_the_same_run():
    pytest.importorskip("triton")
    from tests.worker.executors.gpu import interpreter  # noqa: F401  # makes Triton's rounding that of a device

    findings = steps.measure("tiny", CPU, steps.TINY, 0.0)
    measured = [row["step"] for row in findings.rows if "step" in row]
    assert measured == ["decode 2 at 16", "prompt of 8"]
    assert all(row["ms"] > 0 and 0 < row["share"] < 1 for row in findings.rows if "step" in row)
    draws = [row["draws"] for row in findings.rows if "draws" in row]
    assert draws == ["decode 2, drawn"]


@pytest.mark.parametrize("executor", ["auto", pytest.param("hf", marks=pytest.mark.slow)])
def test_first_tokens_and_a_sustained_load(executor):
    findings = serving.measure("tiny", "cpu", load.TINY, executor)
    check_load(findings, "holdfast")
    assert executor == "auto" or "hf" in findings.notes[0]


@pytest.mark.slow
def test_the_same_load_on_transformers_batching():
    check_load(transformers_batching.measure("tiny", CPU, load.TINY, 4096), "transformers")


@pytest.mark.slow
def test_a_killed_rank_answers_its_callers_and_another_replica_serves():
    (row,) = lost_rank.measure("tiny", "cpu").rows
    assert 0 < row["answered after, ms"] < 60_000
    assert row["its 8 tokens, ms"] > 0


@pytest.mark.slow
def test_tests_are_counted_by_name(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_few(n): assert n == 1\n"
        "@pytest.mark.skip\ndef test_none(): pass\n"
    )
    assert exactness.measure(CPU, str(tests)).rows == (
        {"test": "test_few", "passed": 1, "failed": 1, "left out": 0},
        {"test": "test_none", "passed": 0, "failed": 0, "left out": 1},
    )


@pytest.mark.slow
def test_tests_for_a_gpu_are_left_out_without_one():
    assert all(row["passed"] == row["failed"] == 0 for row in exactness.measure(CPU).rows)


def test_one_command_writes_a_report_and_says_what_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu", "--model", "tiny", "--device", "cpu", "--out", str(tmp_path)])
    done = Findings(title="Steps", machine="m", rows=({"step": "decode", "ms": 1.23456},), notes=("A note.",))
    monkeypatch.setattr(everything, "run", lambda name, command: done if name == "steps" else f"{name}: needs two GPUs")
    assert everything.main() == 1
    (report,) = tmp_path.glob("*.md")
    text = report.read_text()
    assert "| decode | 1.235 |" in text
    assert "A note." in text
    assert "- lost rank: needs two GPUs" in text
    content = json.loads(report.with_suffix(".json").read_text())
    assert content["findings"][0]["rows"] == [{"step": "decode", "ms": 1.23456}]
    assert len(content["not done"]) == 7


@pytest.mark.slow
def test_a_measurement_runs_in_a_process_of_its_own_and_its_end_is_told():
    assert everything.run("one", ["lost_rank", "--model", "nonsense"]).startswith("one: ")
    assert everything.run("one", ["exactness", "--device", "cpu"], limit_s=0.01) == "one: not done in 0 s"


def test_findings_are_read_as_they_were_written(tmp_path, capsys):
    findings = Findings(title="t", machine="m", rows=({"a": 1, "b": "x"}, {"c": 2.5}), notes=("n",))
    tell(findings, tmp_path / "f.json")
    assert read(tmp_path / "f.json") == findings
    assert capsys.readouterr().out.count("|---|") == 2
