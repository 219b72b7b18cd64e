"""The page's streams in JavaScript, by the resume record of all clients: cut after any delta, they are whole."""

import json
import shutil
from pathlib import Path

import pytest

from holdfast.router.api.http.page_files import FOLDER
from tests.cluster.client.two_routers import NUM_TOKENS, two_routers
from tests.loops import on_a_loop
from tests.programs import printed_by
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, text_of

PROGRAM = """
import { heldStream } from "./stream.mjs";
const [url, body] = process.argv.slice(2);
const told = { texts: ["", ""], ends: 0, tokens: 0, lost: 0, back: 0 };
const options = { signal: new AbortController().signal, onLost: () => told.lost++, onBack: () => told.back++ };
for await (const { chunks, numTokens } of heldStream(url, JSON.parse(body), options)) {
  told.tokens += numTokens;
  for (const choice of chunks.flatMap((chunk) => chunk.choices)) {
    told.texts[choice.index] += choice.delta.content ?? "";
    told.ends += choice.finish_reason !== null;
  }
}
console.log(JSON.stringify(told));
"""
CUTS = (0, 1, 3, 6)
"""Marks that each connection brings; the one after them brings the rest."""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which is not on the path")
@on_a_loop
async def test_a_stream_of_the_page_that_is_cut_again_and_again_is_whole(tmp_path: Path):
    (tmp_path / "stream.mjs").write_text((FOLDER / "stream.js").read_text())
    program = tmp_path / "client.mjs"
    program.write_text(PROGRAM)
    body = {"model": "fake", "messages": HELLO, "seed": 5, "n": 2, "max_tokens": NUM_TOKENS, "stream": True}
    async with two_routers() as place:
        place.cut(*((num_marks, 7) for num_marks in CUTS))
        url = f"http://{place.addresses[0]}/v1/chat/completions"
        message = json.loads(await printed_by("node", program, url, json.dumps(body)))
        assert place.num_cut == len(CUTS)
    assert message["texts"] == [text_of(RENDERED, seed, NUM_TOKENS) for seed in (5, 6)]
    assert (message["ends"], message["tokens"]) == (2, 2 * NUM_TOKENS)
    assert message["lost"] == message["back"] == len(CUTS)
