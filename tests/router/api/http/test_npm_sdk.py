"""OpenAI's client of npm, in a process of node: whole, streamed, tools, responses, errors, a stream that it leaves."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import fakes
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.programs import printed_by
from tests.router.api.http.test_openai_sdk import text_of
from tests.router.api.http.test_tools import CALL, TEMPLATE, TOOLS
from tests.router.site import site

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which is not on the path")

FOLDER = Path(__file__).with_name("npm")
RENDERED = b"<user>hello<a>"


@pytest.fixture(scope="module")
def sdk() -> Path:
    """The program, with its client installed where it stands."""
    if not (FOLDER / "node_modules/openai/package.json").is_file():
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
    return FOLDER / "client.mjs"


@pytest.fixture
def _calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with tools is answered with a call."""
    said, plain = list((CALL + "!" * 500).encode()), fakes.fake_token

    def token(prompt, seed: int, index: int) -> int:
        return said[index] if b"[weather]" in bytes(prompt) else plain(prompt, seed, index)

    monkeypatch.setattr("tests.fakes.fake_token", token)


@pytest.mark.usefixtures("_calls")
@on_a_loop
async def test_the_npm_client_is_served(sdk):
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE), http=True) as place:
        url = f"http://{place.router.http_address}/v1"
        message = json.loads(await printed_by("node", sdk, url, json.dumps(TOOLS)))
    text = text_of(RENDERED, 5, 6)
    assert message["models"] == ["fake"]
    assert message["whole"] == [text, "length", 6]
    assert message["streamed"] == [text, 6]
    assert message["completion"] == text_of(b"hello", 5, 6)
    assert message["called"] == ["tool_calls", [["weather", '{"city": "Oslo"}']]]
    assert (message["responses"], message["ended"]) == (text, ["incomplete", 6])
    assert message["refused"] == [
        ["BadRequestError", 400, "temperature", "invalid_value"],
        ["NotFoundError", 404, "model", "model_not_found"],
    ]
    assert replica.num_tokens < 40_000, "the stream that was left has ended"
