"""Long lists of objects are parsed part by part: a body, or what is wrong in it, is as if it were parsed whole."""

import json
import random
from typing import Any

import pytest

from holdfast.router.api.http.bodies import ChatBody
from holdfast.router.api.http.messages_body import MessagesBody
from holdfast.router.api.http.request_reader import body_bounds
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.config import LimitsConfig
from holdfast.router.wire import json_bounds
from holdfast.worker.errors import InvalidRequestError

BOUNDS = body_bounds(LimitsConfig())
KINDS = (ChatBody, MessagesBody, ResponsesBody)
TURN = {"role": "user", "content": 'a "quoted" \\ é \n [{,}] text'}
VALUES: list[Any] = [TURN, {}, {"a": [1, {"b": [[], {}]}, "},{"]}, {"content": [TURN, TURN], "x": None}, {"y": 1.5e3}]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_bounds, "_PART", 16)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is parsed in parts."""
    seen: list[bytes] = []
    whole = json_bounds.from_json
    monkeypatch.setattr(json_bounds, "from_json", lambda part: seen.append(part) or whole(part))
    return seen


def said(kind: type, content: bytes, bounds: Any) -> Any:
    """The fields that a body has, or the error."""
    try:
        body = kind.read(content, bounds)
    except InvalidRequestError as error:
        return error.field, error.limit
    return body.model_dump() | {"fields": body.model_fields_set}


def bodies(seed: int) -> bytes:
    rng = random.Random(seed)
    lists = {
        name: [rng.choice(VALUES) for _ in range(rng.randrange(6))]
        for name in ("messages", "input", "tools", "documents", "system", "other")
        if rng.random() < 0.8
    }
    fields = {"messages": [TURN], "input": [TURN], "max_tokens": 3, **lists, "stream": True}
    text = json.dumps(dict(rng.sample(list(fields.items()), len(fields))), indent=rng.choice([None, None, 1]))
    return text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_are_the_same_in_parts(kind: type, parsed: list[bytes]):
    for seed in range(60):
        content = bodies(seed)
        assert said(kind, content, BOUNDS) == said(kind, content, None), content
    assert len(parsed) > 60


ITEMS = json.dumps([TURN] * 5)[1:-1]


@pytest.mark.parametrize(
    "value",
    [
        f"[{ITEMS}]",
        f"[{ITEMS},]",
        f"[{ITEMS},,{ITEMS}]",
        f"[,{ITEMS}]",
        f"[{ITEMS}",
        f"[{ITEMS}]]",
        f"[{ITEMS}}}",
        f"[{ITEMS}], [{ITEMS}]",
        f"[{ITEMS}, 7, {ITEMS}]",
        f'[{ITEMS}, "x"]',
        f"[{ITEMS}, [{ITEMS}]]",
        f"{{{ITEMS}}}",
        f'{{"a": 1, "b": [{ITEMS}], "c": 2}}',
        f"[{ITEMS}, {{]}}, {ITEMS}]",
        f'[{ITEMS}, {{"a": Infinity}}]',
        f'[{ITEMS}, {{"a": "\\ud83d"}}]',
        f"[{ITEMS}] 5",
        f'[{ITEMS}], "messages": []',
        f'[{ITEMS}], "messages": [{ITEMS}, {{"role": "later"}}]',
        f'[], "messages": [{ITEMS}]',
        f'"[{ITEMS.replace(chr(92), "").replace(chr(34), "")}]"',
    ],
)
@pytest.mark.parametrize(
    "form", ['{{"messages": {}}}', '{{"model": "m", "messages": {}, "stream": true}}', '{{"messages": {}']
)
def test_what_is_wrong_is_said_as_of_a_whole_body(form: str, value: str):
    content = form.format(value).encode()
    assert said(ChatBody, content, BOUNDS) == said(ChatBody, content, None)


def test_no_part_is_much_longer_than_the_longest_object(parsed: list[bytes]):
    ChatBody.read(json.dumps({"messages": [TURN] * 50}).encode(), BOUNDS)
    assert max(map(len, parsed)) <= 2 * len(json.dumps(TURN)) + 4
