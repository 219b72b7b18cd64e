"""The runner of others' suites: what it fetches, which tests it runs, and how it counts what came of them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scripts.vllm_suite import differences, fetch, run, suites
from scripts.vllm_suite.differences import Difference, difference_of, read, with_table
from scripts.vllm_suite.suites import Outcome, Server

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_has_the_table_of_the_list():
    page = differences.PAGE.read_text()
    assert with_table(page, differences.table(read())) == page, "run `python -m scripts.vllm_suite.differences`"


def test_a_reason_has_tests_and_tests_have_a_reason(tmp_path):
    file = tmp_path / "differences.txt"
    file.write_text("# a comment\n\nof no use\n  vllm/a.py\n\nno LoRA\n  vllm/a.py::test_b\n  vllm/b.py\n")
    found = [(one.beginning, one.why) for one in read(file)]
    assert found == [("vllm/a.py::test_b", "no LoRA"), ("vllm/a.py", "of no use"), ("vllm/b.py", "no LoRA")]
    for wrong, message in (
        ("no LoRA", "without tests"),
        ("no LoRA\nof no use\n  a", "without tests"),
        ("  a", "no reason"),
    ):
        file.write_text(f"\n{wrong}\n")
        with pytest.raises(ValueError, match=rf"differences.txt:2 .*{message}"):
            read(file)


def test_the_table_is_by_reason():
    rows = differences.table([Difference("b", "no LoRA"), Difference("c", "of no use"), Difference("a", "no LoRA")])
    assert rows == differences.HEADER + "| no LoRA | `a`<br>`b` |\n| of no use | `c` |\n"


def test_the_table_is_replaced_and_what_stands_around_it_stays():
    page = "before\n\n" + differences.HEADER + "| gone | `old` |\n\nafter\n"
    assert with_table(page, differences.table([Difference("new", "it differs")])) == page.replace(
        "| gone | `old` |", "| it differs | `new` |"
    )


def test_counts():
    known = [Difference("vllm/a.py::test_lora[x]", "no LoRA"), Difference("vllm/a.py::test_lora", "none at all")]
    outcomes = [
        Outcome("vllm/a.py::test_lora[x]", "failed", "404"),
        Outcome("vllm/a.py::test_lora[y]", "passed", ""),
        Outcome("vllm/a.py::test_chat", "failed", "assert"),
        Outcome("vllm/a.py::test_text", "passed", ""),
        Outcome("vllm/a.py::test_gpu", "skipped", ""),
    ]
    counts, unknown = run.judged(outcomes, known)
    assert counts == {"known difference": 1, "passed": 2, "failed": 1, "skipped": 1}
    assert [one.test for one in unknown] == ["vllm/a.py::test_chat"]
    assert run.outlived(outcomes, known) == [known[1]]
    assert difference_of("vllm/b.py", known) is None
    assert difference_of("vllm/a.py::test_b[my-lora]", [Difference("vllm/*-lora]", "no LoRA")])
    assert difference_of("vllm/a.py::test_b[my-lora]", [Difference("vllm/*-LoRA]", "no LoRA")]) is None
    whole = [Difference("vllm/*::test_b$", "no LoRA")]
    assert difference_of("vllm/a.py::test_b", whole) == whole[0]
    assert difference_of("vllm/a.py::test_b_too", whole) is None


def test_a_suite_of_which_nothing_was_run_is_a_failure():
    assert run.report("tests", [], Console(file=io.StringIO())) == 1
    assert run.report("tests", [Outcome("vllm/x.py", "passed", "")], Console(file=io.StringIO())) == 0


def test_what_cannot_be_fetched_has_an_exit_code_of_its_own(monkeypatch, tmp_path, capsys):
    def no_index(*_arguments, **_more):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(fetch.subprocess, "run", no_index)
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path)])
    assert run.main() == run.CANNOT_FETCH
    assert "cannot be fetched" in capsys.readouterr().err


def test_tests_ask_for_the_model_and_examples_for_the_address_that_are_served(tmp_path):
    file = tmp_path / "test_a.py"
    file.write_text(
        'MODEL_NAME = "Qwen/Qwen3"\nargs = ["--served-model-name", "claude"]\nask("claude", MODEL_NAME)\n'
        'def test():\n    model_name = "gpt2"\n    make(model="gpt-9", name="other")\n'
    )
    fetch.rename_models([file], "served")
    text = file.read_text()
    assert not any(name in text for name in ("Qwen", "claude", "gpt"))
    assert '"other"' in text
    file.write_text('base = "http://localhost:8000/v1"; other = "http://0.0.0.0:8000"; far = "http://a.example:80"')
    fetch.rename_address([file], "http://127.0.0.1:7")
    assert (
        file.read_text() == 'base = "http://127.0.0.1:7/v1"; other = "http://127.0.0.1:7"; far = "http://a.example:80"'
    )


CONFTEST = """
import pytest
from tests.utils import RemoteOpenAIServer

def helper():
    return 1

@pytest.fixture(scope="module")
def files():
    return RemoteOpenAIServer
"""

SUITE = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from .conftest import helper

MODEL_NAME = "Qwen/Qwen3"

@pytest.fixture(scope="module")
def server(files):
    with RemoteOpenAIServer(MODEL_NAME, ["--enforce-eager"], env_dict={}) as remote:
        yield remote

def test_of_a_class():
    assert SamplingParams(n=2).n == 2

@pytest.mark.skipif(current_platform.is_rocm(), reason="only there")
def test_of_a_server(server):
    assert server.url_for("v1", "models") == "http://127.0.0.1:7/v1/models"
    assert (server.host, server.port, helper()) == ("127.0.0.1", 7, 1)
    assert MODEL_NAME == "served"

def test_that_fails():
    with RemoteOpenAIServer(MODEL_NAME) as remote:
        with pytest.raises(VLLMValidationError):
            remote.get_client()
"""


@pytest.mark.slow  # it runs a pytest of its own
def test_of_vllms_tests_those_of_a_server_are_run(tmp_path):
    root = tmp_path / "vllm-0"
    below = root / "tests" / "entrypoints" / "openai"
    below.mkdir(parents=True)
    for folder in (root / "tests", below.parent, below):
        (folder / "__init__.py").write_text("")
    (root / "tests" / "conftest.py").write_text("import a_thing_that_only_they_have")
    (below / "conftest.py").write_text(CONFTEST)
    (below / "test_a.py").write_text(SUITE)
    (below / "test_b.py").write_text("RemoteOpenAIServer\n")
    (below / "test_c.py").write_text("def test_of_no_server(): assert False\n")
    found = suites.vllm_tests(root, tmp_path, Server("http://127.0.0.1:7", "served", tmp_path))
    shown = {one.test.rpartition("/")[2]: one.outcome for one in found}
    assert shown == {
        "test_a.py::test_of_a_server": "passed",
        "test_a.py::test_that_fails": "failed",
        "test_b.py": "failed",
    }
    assert json.dumps([one.why for one in found if "fails" in one.test]).count("DID NOT RAISE")


def test_the_bundled_model_is_served_with_a_longer_context():
    bundled, other = (run.settings(name)["cluster"]["models"][0]["model"] for name in ("demo", "/a/folder"))
    assert bundled["hf_overrides"] == {"max_position_embeddings": run.CONTEXT}
    assert "hf_overrides" not in other


def test_a_suite_that_is_not_over_or_ends_by_itself_is_a_failure(tmp_path, monkeypatch):
    root = tmp_path / "vllm-0"
    below = root / "tests" / "entrypoints" / "openai"
    below.mkdir(parents=True)
    (below / "test_a.py").write_text("import os\ndef test_a(server): os._exit(9)\n# RemoteOpenAIServer\n")
    (below / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef server(): pass\n")
    server = Server("http://127.0.0.1:7", "served", tmp_path)
    (ended,) = suites.vllm_tests(root, tmp_path, server)
    assert (ended.test, ended.outcome) == ("vllm: its whole suite", "failed")
    assert ended.why == "pytest's exit code is 9"
    monkeypatch.setattr(suites, "SUITE_S", 0.0)
    (late,) = suites.vllm_tests(root, tmp_path, server)
    assert late.why == "not over in 0 s"


def test_an_example_that_fails_says_its_last_line(tmp_path, monkeypatch):
    below = tmp_path / "examples"
    below.mkdir()
    (below / "a.py").write_text("import sys; sys.exit('http://localhost:8000/v1' if sys.argv[1:] else None)")
    monkeypatch.setattr(suites, "EXAMPLES", ("a.py", "a.py --stream"))
    server = Server("http://127.0.0.1:7", "served", tmp_path)
    assert suites.vllm_examples(tmp_path, tmp_path, server) == [
        Outcome("vllm/examples/a.py", "passed", ""),
        Outcome("vllm/examples/a.py --stream", "failed", "http://127.0.0.1:7/v1"),
    ]
