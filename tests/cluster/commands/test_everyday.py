"""Commands of every day: chat, status, logs, doctor, completion."""

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.cluster.commands.catalogue import COMMANDS
from holdfast.cluster.commands.chat import Conversation
from holdfast.cluster.commands.cli import run
from holdfast.cluster.config.config import load_config
from holdfast.cluster.config.layers import Setting
from holdfast.cluster.serve.examination import Level, certificates, examine, tokenizer
from holdfast.cluster.serve.log_files import LogFile, Tail, log_files, merged, session_folder
from holdfast.worker.errors import ConfigurationError, ReplicaError
from holdfast.worker.wire.tls import DAY_S
from tests.certificates import Authority
from tests.router.api.http.served import served

# --- chat ---


class Model:
    """Answers with what it was asked, and fails on `fail`."""

    def __init__(self) -> None:
        self.asked: list[list[dict]] = []

    def __call__(self, messages, show) -> str:
        self.asked.append([dict(one) for one in messages])
        if messages[-1]["content"] == "fail":
            raise ReplicaError("no router answers")
        for piece in ("you said ", messages[-1]["content"]):
            show(piece)
        return f"you said {messages[-1]['content']}"


def talked(*lines: str, system: str | None = None, is_terminal: bool = True) -> tuple[Conversation, Model, int]:
    model, left = Model(), list(lines)

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    conversation = Conversation(model, system)
    return conversation, model, conversation.run(read, is_terminal)


def said(conversation: Conversation) -> list[str]:
    return [f"{one['role']}: {one['content']}" for one in conversation.messages]


def test_what_was_said_goes_with_each_message(capsys):
    conversation, model, code = talked("hello", "  ", "and now", system="be brief")
    assert code == 0
    assert [one["role"] for one in model.asked[1]] == ["system", "user", "assistant", "user"]
    assert said(conversation)[-1] == "assistant: you said and now"
    assert "you said hello\n" in capsys.readouterr().out


def test_retry_undo_new_and_system_change_what_was_said():
    assert said(talked("one", "two", "/undo")[0]) == ["user: one", "assistant: you said one"]
    conversation, model, _ = talked("one", "two", "/retry")
    assert model.asked[2] == model.asked[1]
    assert len(conversation.messages) == 4
    assert said(talked("one", "/new", system="be brief")[0]) == ["system: be brief"]
    assert said(talked("/system be long", "one", system="be brief")[0])[0] == "system: be long"
    assert said(talked("/undo", "/retry", "/system x", "/system")[0]) == []


def test_a_failed_answer_is_told_and_its_message_forgotten(capsys):
    conversation, _, code = talked("one", "fail", "two")
    assert code == 0
    assert said(conversation) == ["user: one", "assistant: you said one", "user: two", "assistant: you said two"]
    assert "holdfast: no router answers" in capsys.readouterr().err
    assert talked("fail", "two", is_terminal=False)[2] == 1


@pytest.mark.parametrize("line", ["/nonsense", "/save", "/save /nowhere/at/all.json"])
def test_a_command_that_cannot_be_done_says_so(line, capsys):
    talked(line)
    assert line.split()[0] in capsys.readouterr().err


def test_a_conversation_is_saved(tmp_path):
    conversation, _, _ = talked("hello", f"/save {tmp_path / 'talk.json'}", "/quit", "never said")
    assert json.loads((tmp_path / "talk.json").read_text()) == conversation.messages


def test_chat_and_status_on_a_server(monkeypatch, capsys):
    with served() as place:
        address = place.place.router.address
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert run(["chat", "--server", address, "--max-tokens", "4"]) == 0
        assert capsys.readouterr().out.strip()
        assert run(["status", "--server", address]) == 0
        shown = capsys.readouterr().out
        assert f"router {address}: 0 requests open" in shown
        assert "fake" in shown
        assert "GGUF Q4_1" in shown
        assert "3 MiB" in shown
        assert run(["status", "--server", f"{address},127.0.0.1:1"]) == 1
        assert "router 127.0.0.1:1: does not answer" in " ".join(capsys.readouterr().out.split())


def test_a_prompt_of_a_hyphen_is_read_from_standard_input(monkeypatch, capsys):
    with served() as place:
        options = ["--server", place.place.router.address, "--max-tokens", "4", "--seed", "1"]
        assert run(["generate", "hello", *options]) == 0
        wanted = capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert run(["generate", "-", *options]) == 0
        assert capsys.readouterr().out == wanted
    assert run(["generate", "hello", "--temprature", "1"]) == 2
    assert "Did you mean --temperature?" in capsys.readouterr().err


def test_settings_of_the_server_are_refused_with_a_server(capsys):
    assert run(["chat", "--server", "localhost:1", "--tp", "2"]) == 2
    assert "--tensor-parallel-size (with --server)" in capsys.readouterr().err


def test_a_status_that_comes_never_is_refused(capsys):
    assert run(["status", "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


# --- logs ---


@pytest.fixture
def ray_folder(tmp_path):
    """Two sessions of Ray: an old one of Holdfast's, and a newer one of somebody else's."""
    logs = tmp_path / "session_2026-01-01_10-00-00_123456_77" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "session_2026-01-02_10-00-00_123456_78" / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(logs.parent)
    router = (
        ":job_id:01\n:actor_name:ServeReplica:holdfast:Router\n2026-01-01 10:00:05,000 WARNING late\n  a second line\n"
    )
    (logs / "worker-aa-01000000-11.err").write_text(router)
    replica = (
        ":job_id:01\n:actor_name:ServeReplica:holdfast:demo#2:Replica\n2026-01-01 10:00:01,000 WARNING early\nhalf a"
    )
    (logs / "worker-bb-01000000-12.err").write_text(replica)
    (logs / "worker-cc-01000000-13.out").write_text(":actor_name:RankActor\n")
    (logs / "worker-dd-01000000-14.err").write_text(":actor_name:ServeReplica:someone:Caller\nnot ours\n")
    (logs / "worker-ee-01000000-15.err").write_text(":actor_name:ServeController\nnot ours\n")
    return tmp_path


def test_logs_are_found_named_and_merged_by_time(ray_folder):
    folder = session_folder(None, ray_folder)
    assert folder == session_folder(77, ray_folder)
    files = list(log_files(folder))
    assert [file.name for file in files] == ["router 11", "replica of demo#2 12", "rank 13"]
    assert merged([Tail(file) for file in files]) == [
        ("replica of demo#2 12", "2026-01-01 10:00:01,000 WARNING early"),
        ("router 11", "2026-01-01 10:00:05,000 WARNING late"),
        ("router 11", "  a second line"),
    ]


def test_a_tail_brings_new_lines_once_and_whole(tmp_path):
    path = tmp_path / "worker-aa-01-11.err"
    path.write_text("one\ntw")
    tail = Tail(LogFile("router 11", path))
    assert [line for _, line in tail.lines()] == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert [line for _, line in tail.lines()] == ["two", "three"]
    assert tail.lines() == []
    path.unlink()
    assert tail.lines() == []


@pytest.mark.parametrize("pid", [None, 78])
def test_no_logs_are_a_clear_error(ray_folder, pid, tmp_path):
    folder = ray_folder if pid else tmp_path / "nowhere"
    with pytest.raises(ConfigurationError, match=r"there are no logs .*--address"):
        session_folder(pid, folder)


def test_the_command_shows_the_last_lines_of_those_that_are_meant(ray_folder, monkeypatch, capsys):
    monkeypatch.setattr("holdfast.cluster.serve.log_files.ray_folder", lambda: ray_folder)
    assert run(["logs", "--pid", "77", "-n", "1"]) == 0
    assert capsys.readouterr().out == "router 11 |   a second line\n"
    assert run(["logs", "replica", "--pid", "77"]) == 0
    assert capsys.readouterr().out == "replica of demo#2 12 | 2026-01-01 10:00:01,000 WARNING early\n"
    assert run(["logs", "router", "--paths", "--pid", "77"]) == 0
    assert capsys.readouterr().out.strip().endswith("worker-aa-01000000-11.err  router 11")
    assert run(["logs", "gateway", "--pid", "77"]) == 2
    assert "router 11" in capsys.readouterr().err


# --- doctor ---


def findings(**settings):
    config = load_config({path.replace("__", "."): Setting(value, "test") for path, value in settings.items()}).config
    return {finding.what: finding for finding in examine(config, quick=True)}


def test_a_machine_that_can_serve_has_nothing_bad():
    found = findings(cluster__port=0)
    assert max(finding.level for finding in found.values()) <= Level.NOTE
    assert {
        "Python",
        "torch",
        "devices",
        "/tmp",
        "ports",
        "files of demo",
        "tokenizer of demo",
        "memory",
    } <= found.keys()


def test_the_weights_are_shown_with_their_quantization_and_memory():
    assert re.fullmatch(r"quantization none, [0-9.]+ MiB in memory", findings(cluster__port=0)["weights of demo"].found)
    found = findings(cluster__port=0, model__quantization="int4")["weights of demo"]
    assert re.fullmatch(r"quantization int4 g32 at load, [0-9.]+ MiB in memory", found.found)
    assert found.level is Level.GOOD


def test_whatever_is_bad_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = findings(
            cluster__port=taken.getsockname()[1], parallel__tensor_parallel_size=3, cache__kv_cache_memory="999999GiB"
        )
    assert "Choose another" in found["ports"].found
    assert "cannot be shared by 3 ranks" in found["files of demo"].found
    assert "lower --kv-cache-memory" in found["memory"].found
    assert all(found[what].level is Level.BAD for what in ("ports", "files of demo", "memory"))


def test_a_certificate_is_shown_with_the_days_that_it_has_left(tmp_path):
    authority = Authority(tmp_path)
    for valid_s, level, said in (
        (30.5 * DAY_S, Level.GOOD, "expires in 30 days"),
        (2.5 * DAY_S, Level.NOTE, "expires in 2.5 days"),
        (-DAY_S, Level.BAD, "has expired"),
    ):
        pair = authority.pair("server", valid_s=valid_s)
        found = findings(cluster__port=0, security__tls_cert=str(pair.cert), security__tls_key=str(pair.key))
        assert (found["security.tls_cert"].level, said in found["security.tls_cert"].found) == (level, True)
    pair.cert.write_text("no PEM")
    config = load_config(
        {
            f"security.tls_{name}": Setting(str(tmp_path / f"server.{end}"), "test")
            for name, end in (("cert", "crt"), ("key", "key"))
        }
    ).config
    (finding,) = certificates(config)
    assert (finding.level, "has no certificate" in finding.found) == (Level.BAD, True)


def test_a_tokenizer_without_a_chat_template_is_noted(tmp_path):
    for path in bundled_path("demo").iterdir():
        shutil.copy(path, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    config = load_config({"model.model": Setting(str(tmp_path), "test")}).config
    finding = tokenizer(config)
    assert (finding.level, finding.found) == (Level.NOTE, "has no chat template")
    assert "--chat-template" in finding.advice


def test_the_doctor_ends_with_1_where_something_is_bad(capsys):
    assert run(["doctor", "--quick", "--tp", "3"]) == 1
    assert "bad  files of demo" in capsys.readouterr().out


@pytest.mark.slow  # loads the model
def test_the_doctor_loads_the_model_and_says_what_it_found(capsys):
    assert run(["doctor", "--port", "0"]) == 0
    shown = capsys.readouterr().out
    assert "memory plan of demo" in shown
    assert "invariance with demo" in shown


# --- completion ---


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zsh", "fish"))])
def test_a_shell_is_told_of_all_commands(shell, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(one.words[-1] in script for one in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


# --- bench ---


def test_ctrl_c_ends_a_bench_and_keeps_what_is_done(tmp_path):
    report = tmp_path / "report.json"
    with served() as router:
        words = ["bench", "--server", f"http://{router.address}", "--requests", "4", "--output-tokens", "2"]
        words += ["--concurrency", ",".join(["1"] * 10_000), "--json", str(report)]
        command = [sys.executable, "-m", "holdfast.cluster.commands.cli", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
            assert "1 at a time: 4 requests" in bench.stderr.readline()
            bench.send_signal(signal.SIGINT)
            shown, message = bench.communicate(timeout=60)
    assert bench.returncode == 130, message
    assert "1 at a time" in shown
    runs = json.loads(report.read_text())["runs"]
    assert runs[0]["completed"] == 4
    assert not runs[0]["interrupted"]
