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
    "none": ({}, 0),
    "on all": ({"cache_control": SHORT}, 300),
    "on the system prompt": ({"system": [text("Be brief.", SHORT)]}, 300),
    "on a tool": ({"tools": [tool(LONG)]}, 3600),
    "on a message": ({"messages": [{"role": "user", "content": [text("hi", SHORT)]}]}, 300),
    "of both kinds": ({"system": [text("Be brief.", LONG)], "cache_control": SHORT}, 3600),
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
        for asked, ttl_s in MARKS.values():
            body = {"model": "fake", "max_tokens": 2, "messages": HI, **asked}
            usage = (await client.messages.create(**body)).usage
            submit = replica.submits[-1]
            assert submit.cache_ttl_s == ttl_s, asked
            num_new = len(submit.prompt_token_ids) - usage.cache_read_input_tokens
            assert (usage.input_tokens, usage.cache_creation_input_tokens) == ((0, num_new) if ttl_s else (num_new, 0))
            written = usage.cache_creation
            by_time = {300: written.ephemeral_5m_input_tokens, 3600: written.ephemeral_1h_input_tokens}
            assert by_time == {300: num_new * (ttl_s == 300), 3600: num_new * (ttl_s == 3600)}
            async with client.messages.stream(**body) as stream:
                streamed = (await stream.get_final_message()).usage
            assert streamed.cache_creation_input_tokens == usage.cache_creation_input_tokens
        for asked, limit in WRONG.values():
            with pytest.raises(anthropic.BadRequestError, match=limit):
                await client.messages.create(**{"model": "fake", "max_tokens": 2, "messages": HI, **asked})
