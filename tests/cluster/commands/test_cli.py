import re
import shlex
import subprocess
import sys

import pytest
from cyclopts.help import format_usage

from holdfast.cluster.commands import cli
from holdfast.cluster.commands.catalogue import COMMANDS as CATALOGUE
from holdfast.cluster.commands.catalogue import GROUPS
from holdfast.cluster.commands.cli import app, run

EVERY = [one.name for one in CATALOGUE]


def holdfast(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cluster.commands.cli", *arguments], capture_output=True, text=True, env=environ
    )


HEAVY = {"torch", "ray", "transformers", "grpc", "tokenizers", "numpy", "pydantic", "pydantic_core", "yaml"}
COMMANDS = [[], *([name] for name in GROUPS), *(name.split() for name in EVERY)]


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


def found_app(words):
    found = app
    for word in words:
        found = found[word]
    return found


@pytest.mark.parametrize("one", CATALOGUE, ids=EVERY)
def test_the_first_line_of_help_is_what_the_command_takes(one):
    words = list(one.words)
    found = found_app(words)
    made = str(format_usage(app, words, [found])).strip()
    said = re.sub(r"\[(?!OPTIONS)\w+\]", "[ARGS]", one.usage).strip()
    assert found.usage == one.usage
    assert f"Usage: {made}" == said


@pytest.mark.parametrize("one", CATALOGUE, ids=EVERY)
def test_a_command_has_a_description_and_examples_that_parse(one, capsys):
    assert run([*one.words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(one.description.split()) in shown
    assert one.examples
    for example in one.examples:
        assert f"holdfast {example}" in shown
        words = shlex.split(example)
        assert tuple(words[: len(one.words)]) == one.words
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        assert command is found_app(one.words).default_command
        assert bound.arguments or words == list(one.words)


@pytest.mark.parametrize("one", CATALOGUE, ids=EVERY)
def test_a_command_takes_a_server_or_says_why_not(one, capsys):
    names = {name for argument in found_app(one.words).assemble_argument_collection() for name in argument.names}
    assert ("--server" in names) is (not one.local)
    if one.local:
        assert run([*one.words, "--server", "elsewhere:50051"]) == 2
        assert f"{one.name} --server: this command has no --server, because {one.local}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["models", "list", "--pid", "4"], "--pid (with --server)"),
        (["models", "remove", "m", "--namespace", "other"], "--namespace (with --server)"),
        (["logs", "--paths"], "--paths (with --server)"),
    ],
)
def test_flags_of_this_machine_are_refused_with_a_server(arguments, expected, capsys):
    assert run([*arguments, "--server", "elsewhere:50051"]) == 2
    assert expected in capsys.readouterr().err


def test_help_names_the_essentials_first(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("serve ") < shown.index("generate ") < shown.index("config ")


def test_every_setting_of_the_worker_is_a_flag_of_serve(capsys):
    run(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--tp", "--replicas", "--max-num-seqs", "--kv-cache-memory", "--address"))
    assert "Undefined" not in shown, "a default is missing"


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


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, capsys):
    def load():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    with pytest.raises(ModuleNotFoundError):  # where torch is installed, it is another mistake
        cli.exit_code(load)
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.exit_code(load) == 2
    assert "needs torch: pip install 'holdfast[serve]'" in capsys.readouterr().err
