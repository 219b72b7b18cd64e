"""Streams that any SSE client goes on with after the id of an event: at any event, at another router, in every API."""

import json
import shutil
from pathlib import Path

import httpx2
import pytest

from holdfast.router.api.http.event_stream import EVENT_IDS, LAST_EVENT_ID, EventIds
from holdfast.worker.errors import InvalidRequestError
from tests.cluster.client.two_routers import NUM_TOKENS, two_routers
from tests.loops import on_a_loop
from tests.programs import printed_by
from tests.router.answers import without_times
from tests.router.api.http.test_openai_sdk import HELLO

CHAT = {"messages": HELLO, "seed": 5, "n": 2, "max_tokens": NUM_TOKENS, "stream_options": {"include_usage": True}}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["hello", "you"], "seed": 5, "n": 2, "max_tokens": NUM_TOKENS, "echo": True},
    "/v1/responses": {"input": "hello", "max_output_tokens": NUM_TOKENS, "seed": 5},
    "/v1/messages": {"messages": HELLO, "max_tokens": NUM_TOKENS, "seed": 5},
}


async def streamed(address: str, path: str, body: dict, last: str = "") -> httpx2.Response:
    headers = {LAST_EVENT_ID: last} if last else {EVENT_IDS: "1"}
    async with httpx2.AsyncClient(verify=False) as http:
        return await http.post(
            f"http://{address}{path}", json={"model": "fake", "stream": True, **body}, headers=headers
        )


def events_of(text: str) -> list[tuple[str, str]]:
    """(data, id) of each event; the id is empty where it has none."""
    found = []
    for event in text.split("\n\n")[:-1]:
        lines = event.split("\n")
        data = "\n".join(line for line in lines if not line.startswith("id: "))
        found.append((data, "".join(line.removeprefix("id: ") for line in lines if line.startswith("id: "))))
    return found


def said_by(events: list[tuple[str, str]]) -> dict[int, str]:
    """The text of each choice, and all else that events say, but for how the text is cut."""
    texts: dict[int, str] = {}
    for data, _ in events:
        said = data.partition("data: ")[2]
        one = {} if said == "[DONE]" else json.loads(said)
        for choice in one.get("choices", []):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            texts[-1] = texts.get(-1, "") + f"{choice['index']}{choice['finish_reason']}" * bool(
                choice["finish_reason"]
            )
        delta = one.get("delta", "")
        texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta.get("text", ""))
        if "sequence_number" in one:
            assert one["sequence_number"] == texts.setdefault(-2, 0)
            texts[-2] += 1
        for name in ("usage", "id", "created"):
            if one.get(name):
                texts[name] = without_times(one[name]) if name == "usage" else one[name]
    texts[-1] = "".join(sorted(texts.get(-1, "")))
    return texts


@pytest.mark.parametrize("path", BODIES)
@on_a_loop
async def test_a_client_goes_on_at_another_router_after_any_event(path):
    async with two_routers(step_s=0.0) as place:
        first, second = (router.http_address for router in place.routers)
        events = events_of((await streamed(first, path, BODIES[path])).text)
        whole, num_cuts = said_by(events), 0
        assert sum(map(len, (whole.get(0, ""), whole.get(1, "")))) >= NUM_TOKENS
        for at, (_, event_id) in enumerate(events[:-1]):
            if not event_id or event_id.split(".")[2] == "end":
                continue
            rest = await streamed(second, path, BODIES[path], event_id)
            assert rest.status_code == 200, rest.text
            assert said_by(events[: at + 1] + events_of(rest.text)) == whole, at
            num_cuts += 1
        assert num_cuts >= 3
        over = await streamed(second, path, BODIES[path], events[-1][1])
        assert (over.status_code, over.content) == (204, b"")


@on_a_loop
async def test_a_stream_without_a_seed_has_the_tokens_that_it_had():
    body = {"prompt": "hello", "max_tokens": NUM_TOKENS, "temperature": 1.0}
    async with two_routers(step_s=0.0) as place:
        first, second = (router.http_address for router in place.routers)
        events = events_of((await streamed(first, "/v1/completions", body)).text)
        rest = await streamed(second, "/v1/completions", body, events[2][1])
        assert said_by(events[:3] + events_of(rest.text)) == said_by(events)


@on_a_loop
async def test_without_being_asked_for_there_are_no_ids():
    async with two_routers() as place, httpx2.AsyncClient(verify=False) as http:
        url = f"http://{place.routers[0].http_address}/v1/completions"
        plain = await http.post(url, json={"model": "fake", "stream": True, "prompt": "x", "max_tokens": 3})
        assert "id: " not in plain.text.replace('"id": ', "")


@on_a_loop
async def test_an_id_of_another_request_is_refused_before_any_event():
    path, body = "/v1/completions", {"prompt": "hello", "seed": 5, "max_tokens": NUM_TOKENS}
    async with two_routers(step_s=0.0) as place:
        first, second = (router.http_address for router in place.routers)
        event_id = events_of((await streamed(first, path, body)).text)[3][1]
        for wrong in (body | {"prompt": "hullo"}, body | {"seed": 6}, body | {"max_tokens": 2}):
            refused = await streamed(second, path, wrong, event_id)
            assert refused.status_code == 400, refused.text
            assert LAST_EVENT_ID in refused.text


def test_ids_are_checked():
    good = f"{'a' * 32}.17.0.0:3:9:0000abcd,1:2:2:00000000:stop"
    ids = EventIds.read(good)
    assert (ids.sequences[0].text_length, ids.sequences[1].finish_reason) == (9, "stop")
    junk = [
        "x",
        good + ",",
        good[1:],
        good.replace("stop", "stopped"),
        good.replace("0:3", "x:3"),
        good.replace("1:2", "999999999:2"),
        f"{'a' * 32}.1.0",
        "\n",
    ]
    for wrong in [*junk, good.replace("17", "1" * 20), good.replace(":9:", ":9999999999:")]:
        with pytest.raises(InvalidRequestError, match=LAST_EVENT_ID):
            EventIds.read(wrong)


NODE = """
const [url, body] = process.argv.slice(2);
let text = "", last = "", cuts = 0, done = false;
while (!done) {
  const mine = last ? {"last-event-id": last} : {"x-holdfast-event-ids": "1"};
  const headers = {"content-type": "application/json", ...mine};
  const response = await fetch(url, {method: "POST", body, headers});
  if (response.status === 204) break;
  let buffer = "", seen = 0;
  const decoder = new TextDecoder();
  reading: for await (const data of response.body) {
    buffer += decoder.decode(data, {stream: true});
    for (let end; (end = buffer.indexOf("\\n\\n")) >= 0; ) {
      const lines = buffer.slice(0, end).split("\\n");
      buffer = buffer.slice(end + 2);
      for (const line of lines) {
        if (line === "data: [DONE]") done = true;
        else if (line.startsWith("data: ")) text += JSON.parse(line.slice(6)).choices[0].text;
        else if (line.startsWith("id: ")) last = line.slice(4);
      }
      if (!done && ++seen === 2) { cuts++; break reading; }
    }
  }
}
console.log(JSON.stringify({text, cuts}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which is not on the path")
@on_a_loop
async def test_a_client_of_javascript_leaves_after_every_second_event_and_comes_again(tmp_path: Path):
    body = {"prompt": "hello", "seed": 5, "max_tokens": NUM_TOKENS}
    program = tmp_path / "client.mjs"
    program.write_text(NODE)
    async with two_routers() as place:
        address = place.routers[0].http_address
        whole = said_by(events_of((await streamed(address, "/v1/completions", body)).text))
        url, asked = f"http://{address}/v1/completions", json.dumps({"model": "fake", "stream": True, **body})
        message = json.loads(await printed_by("node", program, url, asked))
        assert message["text"] == whole[0]
        assert message["cuts"] >= 2
