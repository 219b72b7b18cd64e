"""The benchmark against peers, with peers that answer at once: real processes, the whole way to the tables."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import run as command_line
from benchmarks.peers.alternation import Limits
from benchmarks.peers.cases import Case
from benchmarks.peers.folders import Folders
from benchmarks.peers.install import install, installed
from benchmarks.peers.launch import start
from benchmarks.peers.machine import NoiseWatch, describe_machine, peak_memory_mib
from benchmarks.peers.peers import ENVIRONMENTS, OURS, PEERS, Environment, Peer
from benchmarks.peers.results import CaseResult, Comparison, ModelResult, Pair, Run, ServerFacts
from benchmarks.peers.server import ServerError
from benchmarks.peers.session import Session
from benchmarks.peers.tables import legend, sheets
from holdfast.cluster.bundled_model.bundled_model import bundled_path

FAKE = str(Path(__file__).with_name("fake_peer.py"))
CASE = Case(name="a", num_requests=2, num_prompt_tokens=128, max_tokens=64)


def fake(name, **settings):
    return Peer(name=name, environment="", driver=FAKE, settings={"fake": settings})


@pytest.fixture
def folders(tmp_path):
    model = Folders(tmp_path).model("X")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000, "hidden_size": 4}))
    (model / "model.safetensors").write_bytes(bytes(100_000))
    return Folders(tmp_path)


@pytest.fixture
def open_server(folders, tmp_path):
    opened = []

    def open_one(peer, model="X", ours=None):
        opened.append(start(peer, folders, model, ours or {}, tmp_path / f"{peer.name}.log"))
        return opened[-1]

    yield open_one
    for server in opened:
        server.close()


def compare_nothing(model, asked, outputs):
    """As the reference would answer; the prompts and outputs of each server are told apart."""
    assert all(ids[0] == prompt[-1] for one in outputs.values() for prompt, ids in zip(asked, one, strict=True))
    return {name: {"first_choice": 0.5 if name == "wrong" else 1.0, "largest_gap": 0.0} for name in outputs}


def run_session(folders, peers, said, model="X"):
    limits = Limits(rounds=2, least_s=0.0, noise=1e9)
    session = Session(
        folders=folders,
        peers=peers,
        cases=[CASE],
        limits=limits,
        say=said.append,
        our_peer=fake("ours"),
        compare=compare_nothing,
    )
    result, stored = ModelResult(), []
    session.run(model, result, lambda: stored.append(json.loads(json.dumps(result.as_json()))))
    return result, stored


@pytest.mark.slow  # a benchmark, with servers of its own
def test_a_session_measures_every_peer_and_leaves_none_out_in_silence(folders):
    said = []
    absent = Peer(name="absent", environment="vllm", driver="vllm_driver.py")
    peers = [fake("p"), fake("wrong"), fake("dying", dies_after=32), fake("refusing", refuses=True), absent]
    result, stored = run_session(folders, peers, said)
    case = result.cases["a"]
    assert len(case.comparisons["p"].pairs) == len(case.comparisons["wrong"].pairs) == 2
    assert "out of memory" in case.comparisons["dying"].error, "the end of its log says why"
    assert "ValueError: no" in result.servers["refusing"].error
    assert "not installed" in result.servers["absent"].error
    assert result.servers["p"].versions.keys() == {"pytest"}
    assert result.servers["p"].start_s > 0
    assert result.servers["p"].peak_memory_mib > 0
    assert case.our_parts == {"prefill": 0.25, "decode": 0.75}
    assert result.weight_bytes == 100_000 - 1000 * 4 * 2, "untied embeddings are not read"

    last = stored[-1]["cases"]["a"]["peers"]["p"]
    assert last["rate"]["least"] <= last["rate"]["median"] <= last["rate"]["most"]
    assert len(last["pairs"]) == 2
    assert set(last["pairs"][0]) == {"theirs", "ours"}

    pages = {sheet.title: sheet.markdown() for sheet in sheets("X", result, "ours", 25.0)}
    assert "| wrong ! |" in pages["X: output tokens/s"]
    assert "| dying | failed |" in pages["X: output tokens/s"]
    assert "**best peer**" in pages["X: ours over each peer, run beside run"]
    assert "left out: not installed" in pages["X: servers"]
    assert "0 rounds were dropped" in legend([result], 0.06)
    assert any("absent left out: not installed" in line for line in said)


def test_a_gguf_file_is_served_as_it_is_and_peers_that_read_none_are_left_out(folders):
    import gguf

    file = folders.served("S-q8_0")
    file.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(["a"] * 1000)
    head = gguf.quants.quantize(np.ones((1000, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, head, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    absent = Peer(name="absent", environment="vllm", driver="vllm_driver.py")
    result, _ = run_session(folders, [absent], [], model="S-q8_0")
    assert result.servers["absent"].error == "it does not read GGUF files"
    assert result.weight_bytes == 1000 * 34, "the head, and not the table of embeddings beside it"
    assert file.is_file()


def test_a_failure_of_ours_ends_every_process(folders):
    session = Session(
        folders=folders, peers=[], cases=[CASE], limits=Limits(), say=print, our_peer=fake("ours", refuses=True)
    )
    with pytest.raises(ServerError, match="ValueError: no"):
        session.run("X", ModelResult(), lambda: None)


def test_an_answer_with_too_few_tokens_is_an_error(open_server):
    server = open_server(fake("p", short=True))
    server.await_ready()
    with pytest.raises(ServerError, match=r"asked for 1 x 4 tokens, gave 1 of lengths \[3\]"):
        server.ask("a", [[1, 2]], 4)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow  # a benchmark, with servers of its own
def test_a_server_is_paused_but_while_it_answers_and_gone_when_closed(open_server):
    server = open_server(fake("p"))
    server.await_ready()
    assert server.ask("a", [[1, 2], [7]], 3).ids == [[2, 3, 4], [7, 8, 9]]
    os.waitid(os.P_PID, server.group, os.WSTOPPED | os.WNOWAIT)
    assert state_of(server.group) == "T"
    assert server.ask("a", [[5]], 1).ids == [[5]]
    assert peak_memory_mib(server.group) > 0
    server.close()
    assert not server.is_alive


def test_a_paused_server_ends_with_a_runner_that_is_killed(tmp_path):
    program = f"""
import os, pathlib, sys
from benchmarks.peers.server import Server
server = Server("p", [sys.executable, {FAKE!r}, "X", "{{}}"], os.environ, pathlib.Path({str(tmp_path / "log")!r}))
server.await_ready()
server.pause()
print(server.group, flush=True)
sys.stdin.read()
"""
    root = str(Path(__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": root}
    runner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=variables
    )
    group = int(runner.stdout.readline())
    descriptor = os.pidfd_open(group)
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    ended, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    assert ended


def test_the_noise_watch_tells_ours_from_others():
    watch = NoiseWatch(os.getpgrp())
    sum(range(3_000_000))
    usage = watch.usage()
    assert usage.ours > 0
    assert usage.others >= 0
    assert {"cpu", "cores", "memory_gib", "instructions"} <= describe_machine().keys()


def test_a_peer_that_cannot_be_installed_is_left_out_with_its_reason(tmp_path):
    environment = Environment(name="none", requirements=("no-such-package",), probe="no_such_module")
    folders = Folders(tmp_path)
    python = folders.python("none")
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no network here\nexit 7\n")
    python.chmod(0o755)
    report = install(environment, folders)
    assert "ended with 7" in report["failed"]
    assert "no network here" in report["failed"]
    assert installed(environment, folders) == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "S,X"], "models: no such model: X"),
        (["--cases", "z"], "cases: no such case: z"),
        (["--peers", "nobody"], "peers: no such peer: nobody"),
        (["--rounds", "0"], "rounds: 0: must be at least 1"),
        (["--setting", "x"], "setting: x: must be NAME=VALUE"),
        (["--out", "/nowhere/at/all.json"], "there is no such folder"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit):
        command_line.main()
    assert message in capsys.readouterr().err


def test_the_table_of_peers_is_whole():
    drivers = Path(command_line.__file__).parent / "drivers"
    for peer in (OURS, *PEERS.values()):
        assert not peer.serves or peer.serves in (OURS.name, *PEERS)
        assert (drivers / peer.driver).exists()
        assert not peer.environment or peer.environment in ENVIRONMENTS
    for environment in ENVIRONMENTS.values():
        assert not environment.converter or (drivers / environment.converter).exists()


def test_a_server_on_a_network_keeps_a_share_of_the_offline_rate():
    def run(seconds):
        return Run(seconds=seconds, num_tokens=100, others=0.0)

    def beside_ours(seconds):
        return Comparison(pairs=[Pair(theirs=run(seconds), ours=run(1.0))])

    comparisons = {"vllm": beside_ours(2.0), "vllm-http": beside_ours(4.0), "holdfast-http": beside_ours(1.25)}
    result = ModelResult(
        servers={name: ServerFacts() for name in ("holdfast", *comparisons)},
        cases={"a": CaseResult(comparisons=comparisons, num_bursts=1)},
    )
    (page,) = [sheet.rows for sheet in sheets("X", result, "holdfast", None) if "keeps" in sheet.title]
    assert page == [["vllm-http", "vllm", "50%"], ["holdfast-http", "holdfast", "80%"]]
    assert result.cases["a"].best_peer == "vllm", "our own server is no peer"


@pytest.mark.slow
def test_our_http_driver_gives_the_ids_of_our_offline_one(folders, open_server):
    folders.model("demo").symlink_to(bundled_path("demo"))
    ours = {"max_model_len": 256, "kv_cache_memory": "64MiB"}
    offline, served = open_server(OURS, "demo", ours), open_server(PEERS["holdfast-http"], "demo")
    for server in (offline, served):
        assert server.await_ready().keys() >= {"holdfast", "torch"}
    asked = [[5, 6, 7, 8], [9, 10, 11]]
    answer = served.ask("a", asked, 8)
    assert answer.ids == offline.ask("a", asked, 8).ids
    assert answer.parts.keys() == {"prefill", "decode"}


@pytest.mark.slow
def test_our_own_driver_answers_by_the_protocol(folders, open_server):
    folders.model("demo").symlink_to(bundled_path("demo"))
    server = open_server(OURS, "demo", {"max_model_len": 256, "kv_cache_memory": "64MiB", "dtype": "float32"})
    assert server.await_ready().keys() >= {"holdfast", "torch"}
    asked = [[5, 6, 7, 8], [9, 10, 11]]
    plain, split = server.ask("a", asked, 8), server.ask("a", asked, 8, split=True)
    assert plain.ids == split.ids
    assert plain.parts == {}
    assert {"prefill", "decode", "steps"} == split.parts.keys()
