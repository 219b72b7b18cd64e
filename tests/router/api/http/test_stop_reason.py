"""What has ended an output, as stock clients are told: vLLM's `stop_reason`, Anthropic's `stop_sequence`."""

from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_messages_and_responses import claude
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, openai_site, text_of

CHAT = text_of(RENDERED, 5, 9)
ENDS = [
    ({"stop": ["?", CHAT[3:5]]}, "stop", CHAT[3:5]),
    ({"stop": [CHAT[3:5]], "extra_body": {"include_stop_str_in_output": True}}, "stop", CHAT[3:5]),
    ({"extra_body": {"stop_token_ids": [0, ord(CHAT[4])]}}, "stop", ord(CHAT[4])),
    ({"stop": ["?"]}, "length", None),
]


async def streamed(stream) -> list[tuple[int, str, object]]:
    """Of each choice, what its last chunk says."""
    choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
    ends = [one for one in choices if one.finish_reason]
    assert not any(getattr(one, "stop_reason", None) for one in choices if not one.finish_reason)
    return sorted((one.index, one.finish_reason, one.stop_reason) for one in ends)


@on_a_loop
async def test_a_chat_says_the_stop_string_or_token_that_has_ended_it_whole_and_streamed():
    async with openai_site(await FakeReplica.start(step_s=0.0)) as (_, client):
        for fields, reason, ended_by in ENDS:
            asked = {"model": "fake", "messages": HELLO, "seed": 5, "max_tokens": 9, **fields}
            (choice,) = (await client.chat.completions.create(**asked)).choices
            assert (choice.finish_reason, choice.stop_reason) == (reason, ended_by)
            stream = await client.chat.completions.create(**asked, stream=True)
            assert await streamed(stream) == [(0, reason, ended_by)]


@on_a_loop
async def test_each_choice_of_each_prompt_has_its_own():
    """Choice 0 of `hello` ends by its token, and the others by what comes first in them, or by their length."""
    texts = [text_of(prompt, seed, 9) for prompt in (b"hello", b"you") for seed in (5, 6)]
    stop, token = texts[1][4:6], texts[2][3]
    wanted = [ended(text, stop, token) for text in texts]
    assert len({by for _, by in wanted}) == 3
    asked = {"model": "fake", "prompt": ["hello", "you"], "n": 2, "seed": 5, "max_tokens": 9, "stop": [stop]}
    asked["extra_body"] = {"stop_token_ids": [ord(token)]}
    async with openai_site(await FakeReplica.start(step_s=0.0)) as (_, client):
        whole = await client.completions.create(**asked)
        stream = await streamed(await client.completions.create(**asked, stream=True))
    assert [(one.finish_reason, one.stop_reason) for one in whole.choices] == wanted
    assert stream == [(index, *one) for index, one in enumerate(wanted)]


def ended(text: str, stop: str, token: str) -> tuple[str, object]:
    found = {text.find(stop) + len(stop) - 1: stop if stop in text else None}
    found[text.find(token)] = ord(token) if token in text else None
    first = min((at for at, by in found.items() if by is not None), default=None)
    return ("length", None) if first is None else ("stop", found[first])


@on_a_loop
async def test_the_best_of_several_keeps_its_own():
    """Ranked by log-probability, of which this replica has none, all are equal: the first ones are the best."""
    texts = [text_of(b"hello", seed, 9) for seed in (5, 6, 7)]
    stops = [texts[0][2:4], texts[1][5:7]]
    asked = {"model": "fake", "prompt": "hello", "n": 2, "best_of": 3, "seed": 5, "max_tokens": 9, "stop": stops}
    async with openai_site(await FakeReplica.start(step_s=0.0)) as (_, client):
        whole = await client.completions.create(**asked)
    assert [one.stop_reason for one in whole.choices] == stops


@on_a_loop
async def test_a_message_says_the_stop_sequence_whole_and_streamed():
    async with openai_site(await FakeReplica.start(step_s=0.0)) as (place, _), claude(place) as client:
        for stops, reason, sequence in (([CHAT[3:5]], "stop_sequence", CHAT[3:5]), (["?"], "max_tokens", None)):
            asked = {"model": "fake", "max_tokens": 9, "messages": HELLO, "stop_sequences": stops}
            whole = await client.messages.create(**asked, extra_body={"seed": 5})
            assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
            async with client.messages.stream(**asked, extra_body={"seed": 5}) as stream:
                final = await stream.get_final_message()
            assert (final.stop_reason, final.stop_sequence) == (reason, sequence)
        body = {"seed": 5, "stop_token_ids": [ord(CHAT[2])]}
        by_token = await client.messages.create(model="fake", max_tokens=9, messages=HELLO, extra_body=body)
    assert (by_token.stop_reason, by_token.stop_sequence) == ("end_turn", None)
