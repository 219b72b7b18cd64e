import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cluster.commands import status
from holdfast.cluster.commands.cli import run
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2


def test_generate_prints_the_completion_and_what_it_took(
    tiny_model: Path,
    greedy_by_hugging_face: Callable[[list[int], int], list[int]],
    capsys: pytest.CaptureFixture[str],
):
    tokenizer = Tokenizer.load(str(tiny_model))
    expected = tokenizer.decode(greedy_by_hugging_face(tokenizer.encode("hello"), 6))
    capsys.readouterr()
    settings = ["--model", str(tiny_model), "--dtype", "float32", "--num-threads", "1", "--num-blocks", "16"]
    assert run(["generate", "hello", "--max-tokens", "6", *settings]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected + "\n"
    assert "6 tokens in" in shown.err
    assert "ended by length" in shown.err


def test_generate_shows_several_completions_with_their_log_probabilities(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    settings = ["--model", str(tiny_model), "--dtype", "float32", "--num-threads", "1", "--num-blocks", "16"]
    assert (
        run(["generate", "hello", "-n", "2", "--best-of", "3", "--logprobs", "1", "--max-tokens", "4", *settings]) == 0
    )
    shown = capsys.readouterr()
    assert [line[:4] for line in shown.out.splitlines()] == ["[0] ", "[1] "]
    assert shown.err.count("ended by length, log-probability") == 2
    assert "completion 1" in shown.err
    assert run(["generate", "hello", "--beam-width", "2", "--echo", "--max-tokens", "4", *settings]) == 0
    assert capsys.readouterr().out.startswith("[0] hello")


def test_estimate_says_what_a_model_needs(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["estimate", str(tiny_model), "--dtype", "float32", "--kv-cache-memory", "1MiB"]) == 0
    shown = capsys.readouterr().out
    assert "weights     " in shown
    assert ", quantization none" in shown
    assert "768 B a token" in shown  # 2 layers x 2 KV heads x 48 numbers (32 of a key, 16 of a value) x 4 bytes
    assert "in 1020 KiB" in shown
    assert "85 blocks" in shown
    assert "5 sequences of 256 tokens" in shown
    assert "fewer than 162,760 | 1,627,604 | 16,276,041 tokens a second" in shown, "125 MB/s are so many times 768 B"


def test_estimate_says_the_scheme_and_its_memory(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    memory = []
    for scheme in ("none", "int8", "int4"):
        asked = [] if scheme == "none" else ["--quantization", scheme]
        assert run(["estimate", str(tiny_model), "--dtype", "bfloat16", *asked]) == 0
        (found,) = re.findall(r"^weights +([0-9.]+) KiB, quantization (.*)$", capsys.readouterr().out, re.MULTILINE)
        memory.append(float(found[0]))
        assert found[1].startswith(scheme)
    assert memory[0] > memory[1] > memory[2]


def test_estimate_says_nothing_of_transfers_where_there_are_none(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["estimate", str(tiny_model), "--no-kv-transfer"]) == 0
    assert "transfers" not in capsys.readouterr().out


def test_estimate_says_what_steps_should_take_on_a_device(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["estimate", str(tiny_model), "--device", "h200", "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "h200, tensor parallel 2" in shown
    assert "decode 64 of 1024" in shown
    assert "gate and up" in shown
    assert run(["estimate", str(tiny_model), "--device", "h300"]) == 2
    assert "h200" in capsys.readouterr().err


def test_estimate_says_what_fp8_saves(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """Of 2 layers with 2 KV heads of 16 dimensions: 8 rows of 32 bytes, or of 17. On a CPU nothing reads them."""
    for dtype, of_token in (("auto", "256 B"), ("fp8", "136 B")):
        assert run(["estimate", str(tiny_model), "--device", "h200", "--kv-cache-dtype", dtype]) == 0
        assert f"{of_token} a token" in capsys.readouterr().out
    for command in (["estimate", "--device", "cpu"], ["serve", "--device", "cpu"], ["serve", "--executor", "hf"]):
        assert run([*command, str(tiny_model), "--kv-cache-dtype", "fp8"]) == 2
        assert "cache.kv_cache_dtype = 'fp8': " in capsys.readouterr().err


def test_estimate_says_what_int8_saves(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """Of 2 layers with 2 KV heads of 16 dimensions in float32, of which keys are filled up to 32."""
    for dtype, of_token in (("auto", "768 B"), ("float32", "768 B"), ("int8", "208 B")):
        assert run(["estimate", str(tiny_model), "--device", "cpu", "--kv-cache-dtype", dtype]) == 0
        assert f"{of_token} a token" in capsys.readouterr().out
    for dtype, device in (("bfloat16", "cpu"), ("fp8", "cpu"), ("int8", "h200")):
        assert run(["estimate", str(tiny_model), "--device", device, "--kv-cache-dtype", dtype]) == 2
        assert f"cache.kv_cache_dtype = '{dtype}': " in capsys.readouterr().err


def test_a_model_that_is_not_there_is_a_mistake_of_the_caller(capsys: pytest.CaptureFixture[str]):
    for command in (["generate", "hello", "--model"], ["estimate"], ["serve"]):
        assert run([*command, "/nowhere/model"]) == 2
        assert "/nowhere/model" in capsys.readouterr().err


def test_a_draft_model_that_is_not_there_is_named_as_that(tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    for command in (["generate", "hello", "--model", str(tiny_model)], ["serve", str(tiny_model)]):
        assert run([*command, "--speculative", "draft", "--draft-model", "/nowhere/draft"]) == 2
        assert "speculation.draft_model = '/nowhere/draft': there is no such folder" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 2
    assert f"cluster.port = {port}" in capsys.readouterr().err


def test_stats_shows_a_row_for_each_replica(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    message = inference_pb2.ReplicaStats(
        num_prefix_query_tokens=200,
        num_prefix_hit_tokens=150,
        num_evictions=11,
        num_preemptions=12,
        num_cached_blocks=13,
        num_wasted_slots=14,
        num_forked_tokens=15,
        num_draft_tokens=40,
        num_accepted_tokens=30,
        num_expired=16,
        num_tokens_generated=300,
        step_time_s=2.0,
    )
    replicas = [
        inference_pb2.ReplicaLoad(
            replica_id="r0", num_running=1, num_waiting=2, num_free_blocks=90, num_total_blocks=100, stats=message
        ),
        inference_pb2.ReplicaLoad(replica_id="r1", num_free_blocks=100, num_total_blocks=100),
    ]

    async def load(server: str, options: object) -> inference_pb2.GetLoadResponse:
        assert server == "host:1"
        return inference_pb2.GetLoadResponse(num_open=5, num_queued=3, replicas=replicas)

    monkeypatch.setattr(status, "_load", load)
    assert run(["stats", "--server", "host:1"]) == 0
    heads, first, second, last = capsys.readouterr().out.splitlines()
    assert heads.split()[:6] == ["replica", "running", "waiting", "used", "cached", "free"]
    assert first.split() == ["r0", "1", "2", "10", "13", "90", "14", "75%", "15", "75%", "11", "12", "16", "150"]
    assert second.split() == ["r1", "0", "0", "0", "-", "100", *["-"] * 8]
    assert last.startswith("5 requests open in this router, 3 of them waiting")


def test_stats_without_a_replica_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    async def load(server: str, options: object) -> inference_pb2.GetLoadResponse:
        return inference_pb2.GetLoadResponse(num_open=1, num_queued=1)

    monkeypatch.setattr(status, "_load", load)
    assert run(["stats"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("no replica is up")
    assert last.startswith("1 request open in this router, 1 of them waiting")


def test_stats_of_no_server_is_a_failure(capsys: pytest.CaptureFixture[str]):
    assert run(["stats", "--server", "127.0.0.1:1"]) == 1
    assert "is `holdfast serve` running there?" in capsys.readouterr().err


def test_status_draws_who_sent_blocks_to_whom_the_most_first(capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    told = inference_pb2.ReplicaStats(received_bytes=1 << 20)
    loads = [
        inference_pb2.ReplicaLoad(
            replica_id="r0", model="m", role="decode", received_tokens_from={"r1": 7, "r2": 12345}
        ),
        inference_pb2.ReplicaLoad(replica_id="r1", model="m", role="prefill", stats=told),
        inference_pb2.ReplicaLoad(replica_id="r2", model="m", received_tokens_from={"10.0.0.1:7": 8}),
    ]
    load = inference_pb2.GetLoadResponse(replicas=loads)
    router = status.RouterStatus("a:1", load, inference_pb2.ListModelsResponse())
    Console(width=200).print(status.view([router]))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("blocks sent between replicas")
    assert lines[at - 1] == ""
    assert lines[at + 1 :] == ["r2 -> r0: 12,345 tokens", "10.0.0.1:7 -> r2: 8 tokens", "r1 -> r0: 7 tokens"]
    assert any(line.startswith("m r0 (decode)") for line in lines)
    assert any(line.startswith("m r2 ") for line in lines)
    Console(width=200).print(status.view([status.RouterStatus("a:1", inference_pb2.GetLoadResponse(), router.models)]))
    assert "blocks sent" not in capsys.readouterr().out


def test_status_tells_what_is_on_the_disk():
    """Of a replica whose cache has a store below it."""
    told = inference_pb2.ReplicaStats(num_disk_blocks=7, disk_bytes=1 << 20)
    load = inference_pb2.ReplicaLoad(replica_id="r0", model="m", num_free_blocks=75, num_total_blocks=100, stats=told)
    assert status._replica_row(load)[3] == "25% of 100, 7 on disk"
    load.stats.disk_bytes = 0
    assert status._replica_row(load)[3] == "25% of 100"
