"""Chats as plain data: what is wrong with one, before any template has seen it."""

import pytest

from holdfast.router.chat import MAX_NOW_S, Chat
from holdfast.router.config import LimitsConfig
from holdfast.router.request import GenerationRequest
from holdfast.worker.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "hello"}]

WRONG = (
    ({"messages": "hello"}, "chat.messages", "a list of messages"),
    ({"messages": []}, "chat.messages", "at least one"),
    ({"messages": ["hello"]}, "chat.messages[0]", "role and content"),
    ({"messages": [*HELLO, {"content": "x"}]}, "chat.messages[1].role", "a name"),
    ({"messages": [{"role": "user"}]}, "chat.messages[0].content", "text"),
    ({"messages": HELLO, "now_s": -1}, "chat.now_s", f"[0, {MAX_NOW_S}]"),
    ({"messages": HELLO * 20}, "chat.messages", "at most 100 bytes"),
    ({"messages": HELLO, "template_kwargs": {"x": "y" * 100}}, "chat.messages", "at most 100 bytes"),
)


@pytest.mark.parametrize(("fields", "field", "limit"), WRONG)
def test_what_is_wrong_is_named(fields, field, limit):
    with pytest.raises(InvalidRequestError) as refused:
        GenerationRequest(chat=Chat(**fields)).check(LimitsConfig(max_prompt_bytes=100))
    assert refused.value.field == field
    assert limit in refused.value.limit


def test_a_chat_is_instead_of_a_prompt():
    GenerationRequest(chat=Chat(messages=HELLO)).check(LimitsConfig())
    with pytest.raises(InvalidRequestError, match="must not be set with chat"):
        GenerationRequest(prompt="x", chat=Chat(messages=HELLO)).check(LimitsConfig())
