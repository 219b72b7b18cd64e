"""The gate that keeps the public API compatible with the last release: `buf breaking` against the kept description."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parent.parent / "proto"
BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")


def breaking(proto: Path) -> "subprocess.CompletedProcess[str]":
    assert BUF is not None, "buf-bin belongs to the tools that tests need"
    command = [BUF, "breaking", str(proto), "--against", str(PROTO / "released.binpb")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROTO, tmp_path / "proto", ignore=shutil.ignore_patterns("*.py*", "__pycache__")))


def test_the_api_breaks_no_client_of_the_last_release():
    message = breaking(PROTO)
    assert message.returncode == 0, message.stdout


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("  string model = 1;", "", 'field "1" with name "model" on message "GenerateRequest" was deleted'),
        ("uint32 prompt_tokens = 1;", "uint64 prompt_tokens = 1;", "changed type"),
        ("rpc Abort(", "rpc Stop(", "Abort"),
    ],
    ids=["a field is taken away", "a field has another type", "a method has another name"],
)
def test_what_would_break_one_is_refused(before, after, message, copy):
    path = copy / "holdfast" / "v1" / "inference.proto"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    answer = breaking(copy)
    assert answer.returncode != 0
    assert message in answer.stdout


def test_something_new_breaks_nobody(copy):
    path = copy / "holdfast" / "v1" / "inference.proto"
    path.write_text(path.read_text() + "\nmessage Another {\n  string name = 1;\n}\n")
    assert breaking(copy).returncode == 0
