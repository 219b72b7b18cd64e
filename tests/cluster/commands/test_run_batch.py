"""Command `holdfast run-batch`: the answers of a file's requests in order, also where a run is interrupted."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.cluster.client.batch_run import folder_of
from holdfast.cluster.commands.run_batch import _on_server, run_batch
from holdfast.router.store.database import FILE
from holdfast.worker.errors import ConfigurationError
from tests.loops import on_a_loop
from tests.router.api.http.test_batches import line, text_of
from tests.router.api.http.test_stored_responses import storing
from tests.router.site import Site

OPTIONS = {"api_key": ""}


def custom_ids(target: Path) -> list[str]:
    return [json.loads(one)["custom_id"] for one in target.read_text().splitlines()]


def asked_of(place: Site, source: Path, target: Path):
    return _on_server(f"http://{place.router.http_address}", source, target, OPTIONS, lambda *_: None)


@on_a_loop
async def test_answers_and_errors_come_in_the_order_of_the_lines(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(text_of([line("c"), line("b", temperature=-1), line("a")]))
    async with storing(tmp_path / "store") as (place, client):
        outcome = await asked_of(place, source, target)
        assert (outcome.num_answers, outcome.num_errors, outcome.problems) == (2, 1, ())
        assert custom_ids(target) == ["c", "b", "a"]
        assert [one async for one in client.files.list()] == []
        source.write_bytes(b"{\n" + text_of([line("a", method="GET")]))
        failed = await asked_of(place, source, target)
        assert failed.problems == ("line 1: the line must be JSON", "line 2: method must be POST")
        assert custom_ids(target) == ["c", "b", "a"]


@on_a_loop
async def test_a_run_that_was_interrupted_goes_on_with_its_batch(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(text_of([line(f"{number}") for number in range(4)]))
    async with storing(tmp_path / "store") as (place, client):
        place.replicas[0].pause()
        first = asyncio.create_task(asked_of(place, source, target))
        async with asyncio.timeout(10):
            while len(place.replicas[0].submits) < 4 or not (folder_of(target) / "run.json").exists():
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        state = json.loads((folder_of(target) / "run.json").read_text())
        state.pop("batch")  # as if it had been killed before it knew that
        (folder_of(target) / "run.json").write_text(json.dumps(state))
        source.write_bytes(text_of([line("another")]))
        with pytest.raises(ConfigurationError, match="is that of another run"):
            await asked_of(place, source, target)
        source.write_bytes(text_of([line(f"{number}") for number in range(4)]))
        place.replicas[0].resume()
        assert (await asked_of(place, source, target)).num_answers == 4
        assert custom_ids(target) == ["0", "1", "2", "3"]
        assert len([one async for one in client.batches.list()]) == 1
        assert len(place.replicas[0].submits) == 4
        assert not folder_of(target).exists()


def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(text_of([line("a")]))
    with pytest.raises(ConfigurationError, match="no such file"):
        run_batch(input_file=tmp_path / "none", output_file=target)
    with pytest.raises(ConfigurationError, match="no such folder"):
        run_batch(input_file=source, output_file=tmp_path / "none" / "x")
    with pytest.raises(ConfigurationError, match="must be a URL"):
        run_batch(input_file=source, output_file=target, server="localhost:8000")
    target.touch()
    with pytest.raises(ConfigurationError, match="--overwrite"):
        run_batch(input_file=source, output_file=target)


# --- in one process ---

LINES = [
    line(f"{number}", model="demo", max_tokens=300, temperature=0.9, seed=number, ignore_eos=True)
    for number in range(24)
]


def begun(source: Path, target: Path) -> subprocess.Popen[str]:
    flags = ["-i", source, "-o", target, "--model", "demo", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "holdfast.cluster.commands.cli", "run-batch", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def num_written(target: Path) -> int:
    file = folder_of(target) / FILE
    if not file.exists():
        return 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            written = "holdfast_pieces JOIN holdfast_objects USING (tenant, id) WHERE kind = 'hidden'"
            return int(database.execute(f"SELECT count(*) FROM {written}").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def answers(target: Path) -> Sequence[tuple[str, object]]:
    found = [json.loads(one) for one in target.read_text().splitlines()]
    return [(one["custom_id"], one["response"]["body"]["choices"]) for one in found]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_process_that_is_killed_is_begun_again_and_writes_what_it_would_have_written(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(text_of(LINES))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    undisturbed = begun(source, whole)
    assert undisturbed.wait(100) == 0, undisturbed.stderr.read()
    killed = begun(source, cut)
    while num_written(cut) < 5:
        assert killed.poll() is None, killed.stderr.read()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = num_written(cut)
    assert 5 <= before < len(LINES)
    assert not cut.exists()
    again = begun(source, cut)
    assert again.wait(100) == 0, again.stderr.read()
    assert answers(cut) == answers(whole)
    assert len(answers(cut)) == len(LINES)
