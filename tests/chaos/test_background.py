"""Background responses whose whole cluster is killed in the middle, and started again by the same command."""

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

__all__ = ["start"]  # a fixture

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_RESPONSES = 4
ASKED = {
    "model": "demo",
    "input": "Tell me of Paris.",
    "max_output_tokens": 900,
    "temperature": 0.9,
    "extra_body": {"seed": 3, "ignore_eos": True},
}


def served(start: Callable[..., Command], store: Path) -> tuple[Command, openai.OpenAI]:
    flags = ["--store", str(store), "--port", "0", "--http-port", "0", "--replicas", "1", "--routers", "2"]
    command = start("holdfast.cluster.commands.cli", "serve", "demo", *flags)
    found = command.wait_for(r"curl (http://[0-9.]+:\d+)")
    return command, openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none")


def numbers_of(events: list) -> list[int]:
    return [event.sequence_number for event in events]


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
    for process in [*command.descendants(), psutil.Process(command.process.pid)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    command.finish()
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
