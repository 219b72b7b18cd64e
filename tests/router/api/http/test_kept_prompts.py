"""Each API's own way to keep a prompt cached asks replicas for the same, and its usage says what was written."""

from functools import partial

import anthropic
import pytest

from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_admin import client_of
from tests.router.api.http.test_messages_and_responses import claude
from tests.router.site import site
from tests.router.text.sample_templates import HERMES

LOAD = partial(byte_tokenizer, chat_template=HERMES)
HI = [{"role": "user", "content": "hi"}]
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}

OPENAI = {
    "nothing": ({}, 0, 0),
    "in memory": ({"prompt_cache_retention": "in_memory"}, 300, 0),
    "a day": ({"prompt_cache_retention": "24h"}, 86_400, 0),
    "our own": ({"cache_ttl_s": 60, "cache_prefix_tokens": 2}, 60, 2),
    "our own first": ({"cache_ttl_s": 0, "prompt_cache_retention": "24h"}, 0, 0),
}
BODIES = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}


def text(words, mark=None):
    return {"type": "text", "text": words, **({"cache_control": mark} if mark else {})}


def tool(mark):
    return {"name": "f", "input_schema": {"type": "object"}, "cache_control": mark}


MARKS = {
    "none": ({}, []),
    "on all": ({"cache_control": SHORT}, [("", 300)]),
    "on the system prompt": ({"system": [text("Be brief.", SHORT)]}, [("Be brief.", 300)]),
    "in the system prompt": ({"system": [text("Be brief.", LONG), text(" It is noon.")]}, [("Be brief.", 3600)]),
    "on a tool": ({"tools": [tool(LONG)], "system": "Be brief."}, [("<user>", 3600)]),
    "on a message": ({"messages": [{"role": "user", "content": [text("hi", SHORT)]}]}, [("hi", 300)]),
    "of both kinds": ({"system": [text("Be brief.", LONG)], "cache_control": SHORT}, [("Be brief.", 3600), ("", 300)]),
    "the later one longer": (
        {"system": [text("Be brief.", SHORT)], "cache_control": LONG},
        [("brief.", 300), ("", 3600)],
    ),
    "on a result": (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": "17 degrees", "cache_control": SHORT},
                        text("So?", LONG),
                        text(" Tell me."),
                    ],
                },
            ]
        },
        [("17 degrees", 300), ("So?", 3600)],
    ),
    "on a call": (
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [
                        text("I look."),
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}, "cache_control": SHORT},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "cold"}]},
            ]
        },
        [("<tool>", 300)],
    ),
}

WRONG = {
    "another type": ({"cache_control": {"type": "persistent"}}, "cache_control.type must be ephemeral"),
    "another time": (
        {"system": [text("x", {**SHORT, "ttl": "2h"})]},
        r"system\[0\].cache_control.ttl must be 5m or 1h",
    ),
    "no time": ({"tools": [tool({**SHORT, "ttl": [1]})]}, r"tools\[0\].cache_control.ttl must be"),
    "no object": ({"system": [{"type": "text", "text": "x", "cache_control": 5}]}, "must be an object"),
    "five marks": ({"system": [text("x", SHORT)] * 5}, "must be at most 4 marks"),
}


@on_a_loop
async def test_openais_words_and_ours():
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=LOAD, http=True) as place, client_of(place) as client:
        for path, body in BODIES.items():
            for asked, ttl_s, num_tokens in OPENAI.values():
                answer = await client.post(path, json={**body, **asked})
                assert answer.status_code == 200, answer.text
                submit = replica.submits[-1]
                assert (submit.cache_ttl_s, submit.cache_prefix_tokens) == (ttl_s, num_tokens), (path, asked)
        refused = await client.post("/v1/completions", json={**BODIES["/v1/completions"], "cache_ttl_s": 86_401})
        assert refused.status_code == 400
        assert "cache_ttl_s must be a whole number from 0 to 86400" in refused.text


@on_a_loop
async def test_anthropics_marks():
    replica = await FakeReplica.start()
    async with site(replica, load_tokenizer=LOAD, http=True) as place, claude(place) as client:
        for case, (asked, marks) in MARKS.items():
            body = {"model": "fake", "max_tokens": 2, "messages": HI, **asked}
            usage = (await client.messages.create(**body)).usage
            submit = replica.submits[-1]
            prompt, num_all = bytes(submit.prompt_token_ids).decode(), len(submit.prompt_token_ids)
            assert all(end in prompt for end, _ in marks), (case, prompt)
            wanted = [(prompt.index(end) + len(end) if end else num_all, ttl_s) for end, ttl_s in marks]
            kept = [(mark.num_tokens, mark.ttl_s) for mark in submit.cache_marks]
            kept += [(num_all, submit.cache_ttl_s)] if submit.cache_ttl_s else []
            assert kept == wanted, case
            last = max((place for place, _ in wanted), default=0)
            assert (usage.input_tokens, usage.cache_creation_input_tokens) == (num_all - last, last), case
            longest = max((place for place, ttl_s in wanted if ttl_s == 3600), default=0)
            written = usage.cache_creation
            by_time = (written.ephemeral_1h_input_tokens, written.ephemeral_5m_input_tokens)
            assert by_time == (longest, last - longest), case
            async with client.messages.stream(**body) as stream:
                streamed = (await stream.get_final_message()).usage
            assert streamed.cache_creation == written
        for asked, limit in WRONG.values():
            with pytest.raises(anthropic.BadRequestError, match=limit):
                await client.messages.create(**{"model": "fake", "max_tokens": 2, "messages": HI, **asked})
