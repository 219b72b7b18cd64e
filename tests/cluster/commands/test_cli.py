import re
import subprocess
import sys

import pytest
from cyclopts.help import format_usage

from holdfast.cluster.commands.cli import _ADMIN, _COMMANDS, _usage, app, run

MODELS = ("update", "rollback", "add", "remove", "list")
OF_SEVERAL = ["keys add", "keys list", "keys revoke", "config show", *(f"models {name}" for name in MODELS)]
EVERY = [*(name for name, _, _ in _COMMANDS), *(name for name, _, _ in _ADMIN), *OF_SEVERAL]


def holdfast(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cluster.commands.cli", *arguments], capture_output=True, text=True, env=environ
    )


HEAVY = {"torch", "ray", "transformers", "grpc", "tokenizers", "numpy", "pydantic", "pydantic_core", "yaml"}
COMMANDS = [[], ["keys"], ["models"], ["config"], *(name.split() for name in EVERY), ["drain-node"]]


def test_help_and_completion_import_nothing_heavy_and_declare_no_setting():
    """In one process, one command after the other: what the first of them imports is seen with it."""
    program = f"""
import sys
from holdfast.cluster.commands.cli import run
for command in {COMMANDS}:
    run([*command, "--help"])
    print("LOADED", *sorted({{name.partition(".")[0] for name in sys.modules}} & {HEAVY}))
for shell in ("bash", "zsh", "fish"):
    run(["completion", shell])
    print("LOADED", *sorted({{name.partition(".")[0] for name in sys.modules}} & {HEAVY}))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    pages = shown.split("LOADED")
    assert len(pages) == len(COMMANDS) + 3 + 1
    for command, page, loaded in zip(COMMANDS, pages, pages[1:], strict=False):
        assert "Usage: " + " ".join(["holdfast", *command]) in page
        assert not loaded.splitlines()[0], " ".join(command)
    assert not pages[-1].splitlines()[0], "completion"


@pytest.mark.parametrize("command", EVERY)
def test_the_first_line_of_help_is_what_the_command_takes(command):
    words = command.split()
    found = app
    for word in words:
        found = found[word]
    made = str(format_usage(app, words, [found])).strip()
    said = re.sub(r"\[(?!OPTIONS)\w+\]", "[ARGS]", _usage(command)).strip()
    assert found.usage == _usage(command)
    assert f"Usage: {made}" == said


def test_help_names_the_essentials_first(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("serve ") < shown.index("generate ") < shown.index("config ")


def test_every_setting_of_the_worker_is_a_flag_of_serve(capsys):
    run(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--tp", "--replicas", "--max-num-seqs", "--kv-cache-memory", "--address"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serv"], "serve"),
        (["config", "show", "--tpp", "2"], "--tp"),
        (["config", "show", "--tp", "two"], "parallel.tensor_parallel_size = 'two' (from --tensor-parallel-size)"),
        (["config", "show", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["generate", "hello", "--temperature", "-1"], "sampling_params.temperature = -1.0"),
        (["generate"], "PROMPT"),
    ],
)
def test_a_mistake_of_the_caller_is_one_clear_line_and_code_2(arguments, expected, capsys):
    assert run(arguments) == 2
    stderr = capsys.readouterr().err
    assert expected in stderr
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) == 1


def test_config_show_prints_value_and_source(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOLDFAST_SCHEDULER__MAX_NUM_SEQS", "8")
    path = tmp_path / "serve.toml"
    path.write_text("[cluster]\nreplicas = 3\n")
    assert run(["config", "show", "--config", str(path), "--tp", "2", "--reuse-port"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "scheduler.max_num_seqs = 8  # HOLDFAST_SCHEDULER__MAX_NUM_SEQS" in lines
    assert f"cluster.replicas = 3  # {path}" in lines
    assert "parallel.tensor_parallel_size = 2  # --tensor-parallel-size" in lines
    assert "router.reuse_port = True  # --reuse-port" in lines
    assert "cluster.routers = 2  # default" in lines


def test_a_failed_command_exits_with_its_code():
    done = holdfast("config", "show", "--nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: ")


def test_an_interrupt_is_130(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cluster.config.config.load_config", interrupted)
    assert run(["config", "show"]) == 130
