"""Background responses and batches whose whole cluster is killed in the middle, and started again by the same
command.
"""

import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest

from tests.integration.test_commands import Command, start
from tests.router.api.http.test_batches import CHATS, line, text_of
from tests.router.store.test_response_store import place, postgresql

__all__ = ["place", "postgresql", "start"]  # fixtures

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_RESPONSES = 4
ASKED = {
    "model": "demo",
    "input": "Tell me of Paris.",
    "max_output_tokens": 900,
    "temperature": 0.9,
    "extra_body": {"seed": 3, "ignore_eos": True},
}


def served(start: Callable[..., Command], store: Path | str) -> tuple[Command, openai.OpenAI]:
    flags = ["--store", str(store), "--port", "0", "--http-port", "0", "--replicas", "1", "--routers", "2"]
    command = start("holdfast.cluster.commands.cli", "serve", "demo", *flags)
    found = command.wait_for(r"curl (http://[0-9.]+:\d+)")
    return command, openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none")


def numbers_of(events: list) -> list[int]:
    return [event.sequence_number for event in events]


def kill_all(command: Command) -> None:
    for process in [*command.descendants(), psutil.Process(command.process.pid)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    command.finish()


def test_background_responses_go_on_after_a_blackout(start: Callable[..., Command], tmp_path: Path):
    command, client = served(start, tmp_path)
    right = client.responses.create(store=False, **ASKED).output_text
    made = [client.responses.create(background=True, **ASKED).id for _ in range(NUM_RESPONSES)]
    seen = []
    for event in client.responses.retrieve(made[0], stream=True):
        seen.append(event)
        if len(seen) == 40:
            break
    assert all(client.responses.retrieve(one).status in ("queued", "in_progress") for one in made), "they were over"
    kill_all(command)
    _, client = served(start, tmp_path)
    for one in made:
        while (found := client.responses.retrieve(one)).status in ("queued", "in_progress"):
            time.sleep(0.1)
        assert found.output_text == right
        events = list(client.responses.retrieve(one, stream=True))
        assert numbers_of(events) == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == right
    rest = list(client.responses.retrieve(made[0], stream=True, starting_after=seen[-1].sequence_number))
    assert numbers_of(seen + rest) == list(range(len(seen) + len(rest)))
    assert re.match(r"response\.(completed|incomplete)", rest[-1].type)


NUM_LINES = 30
LINES = [
    line(f"line {number}", model="demo", max_tokens=60 + 28 * number, temperature=0.9, seed=number, ignore_eos=True)
    for number in range(NUM_LINES)
]
"""They end one after the other."""


def submitted(client: openai.OpenAI) -> str:
    file = client.files.create(file=("lines.jsonl", text_of(LINES)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h").id


def answers_of(client: openai.OpenAI, batch_id: str) -> list[tuple[str, object]]:
    while (batch := client.batches.retrieve(batch_id)).status == "in_progress":
        time.sleep(0.1)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed, batch.error_file_id) == ("completed", NUM_LINES, 0, None)
    found = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    return [(one["custom_id"], one["response"]["body"]["choices"]) for one in found]


@pytest.mark.parametrize("place", ["sqlite", "postgresql"], indirect=True)
def test_a_batch_goes_on_after_a_blackout_and_no_line_is_written_twice(start: Callable[..., Command], place: str):
    command, client = served(start, place)
    right = answers_of(client, submitted(client))
    cut = submitted(client)
    while not 5 <= (done := client.batches.retrieve(cut).request_counts.completed) < NUM_LINES:
        assert done < NUM_LINES, "it was over"
        time.sleep(0.02)
    kill_all(command)
    _, client = served(start, place)
    assert client.batches.retrieve(cut).request_counts.completed >= done
    found = answers_of(client, cut)
    assert [custom_id for custom_id, _ in found] == [one["custom_id"] for one in LINES]
    assert found == right
