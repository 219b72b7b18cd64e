"""Log-probabilities of streamed completions: those of whole ones, at offsets into the text that was sent, also where a
stop string takes back what several tokens have said, and where a client goes on after any event.
"""

import json
from typing import Any

import pytest

from tests.fakes import fake_tokens
from tests.loops import on_a_loop
from tests.router.api.http.test_wishes import api, posted

SAID = bytes(fake_tokens(b"hello", 3, 12)).decode()
FIELDS = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
CASES = [
    {},
    {"stop": [SAID[4:9]]},
    {"stop": [SAID[4:9]], "include_stop_str_in_output": True},
    {"stop": [SAID[2:7] + "?", SAID[8:10]]},
    {"stop": [SAID[9:] + "?"]},
    {"stop": [SAID[1:5] + "?"]},
    {"stop": [SAID[4:9]], "echo": True},
    {"stop": [SAID[4:8]], "echo": True, "n": 2},
    {"echo": True, "n": 2, "prompt_logprobs": 1},
    {"prompt": "h", "echo": True, "max_tokens": 0},
    {"stop": [SAID[4:9]], "detokenize": False} | {"stop": None},
]


def asked(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 12, "seed": 3, "logprobs": 2, "return_token_ids": True, **fields}


def events_of(text: str) -> list[tuple[str, dict[str, Any] | None]]:
    """The id of each event, and what it says."""
    found = []
    for event in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((lines.get("id", ""), None if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return found


def joined(events: list[tuple[str, dict[str, Any] | None]], index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "token_ids": [], **{name: [] for name in FIELDS}}
    for choice in (one for _, event in events if event for one in event["choices"] if one["index"] == index):
        found["text"] += choice["text"]
        found["token_ids"] += choice["token_ids"]
        for name in FIELDS:
            found[name] += (choice["logprobs"] or {}).get(name, [])
        most = len(found["text"])
        assert all(at <= most for at in found["text_offset"]), "no offset is beyond what was sent"
    return found


@pytest.mark.parametrize("fields", CASES, ids=str)
@on_a_loop
async def test_a_stream_tells_what_a_whole_answer_tells(fields: dict[str, Any]):
    async with api() as (client, _):
        whole = (await posted(client, "/v1/completions", **asked(fields))).json()
        streamed = events_of((await posted(client, "/v1/completions", stream=True, **asked(fields))).text)
        for choice in whole["choices"]:
            heard = {"text": choice["text"], "token_ids": choice["token_ids"], **choice["logprobs"]}
            assert joined(streamed, choice["index"]) == heard
            for at, token in zip(heard["text_offset"], heard["tokens"], strict=True):
                rest = heard["text"][at:]
                assert rest.startswith(token) or rest == "", (at, token)


BEGUN_TWICE = [SAID[1:5] + "?"]
"""After its first four letters comes its first one: some text is certain then, and some is held back."""


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "stop", [[SAID[2:7] + "?", SAID[8:12]], BEGUN_TWICE], ids=["ends the output", "is begun twice"]
)
@on_a_loop
async def test_a_client_that_resumes_after_any_event_has_every_log_probability_once(stop: list[str], n: int):
    fields = asked({"stop": stop, "n": n})
    async with api() as (client, _):
        body, path = {"model": "fake", "prompt": "hello", **fields, "stream": True}, "/v1/completions"
        first = events_of((await client.post(path, json=body, headers={"x-holdfast-event-ids": "1"})).text)
        wanted = [joined(first, index) for index in range(n)]
        assert wanted[0]["text"] == SAID.partition(stop[-1])[0]
        ids = [number for number, (name, _) in enumerate(first) if name and ".end" not in name]
        assert ids
        for number in ids:
            again = await client.post(path, json=body, headers={"last-event-id": first[number][0]})
            whole = [*first[: number + 1], *events_of(again.text)]
            assert [joined(whole, index) for index in range(n)] == wanted, number
