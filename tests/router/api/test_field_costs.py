"""No field of a body costs much more than its bytes to read: generated from the bodies, at the limits that serve.

Times are CPU times of this thread, in units of what parsing a list of numbers takes.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from pydantic import ValidationError

from benchmarks.router_parts.hostile_fields import BODIES
from holdfast.router.api.http.bodies import ChatBody, CompletionBody
from holdfast.router.api.http.chat_completions import chat_request
from holdfast.router.api.http.request_reader import body_bounds
from holdfast.router.chat import Chat, plain_messages
from holdfast.router.config import LimitsConfig
from holdfast.router.text.adapted_messages import adapted
from holdfast.router.text.template_traits import TemplateTraits
from holdfast.router.wire.chat_codec import json_object
from holdfast.router.wire.json_bounds import MAX_VALUES
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import PARAMETERS

LIMITS = LimitsConfig()
BOUNDS = body_bounds(LIMITS)
MAX_PARSES = 40
"""The dearest takes 10. Without bounds for lists, or with all complaints about a list, it is hundreds."""

NUMBERS = b",".join([b"1"] * 300_000)
VALUES = {
    "numbers": b"[%b]" % NUMBERS,
    "numbers, then a text": b'[%b,"a"]' % NUMBERS,
    "a text, then numbers": b'["a",%b]' % NUMBERS,
    "numbers, then null": b"[%b,null]" % NUMBERS,
    "few numbers, then null": b"[%b,null]" % NUMBERS[:60_000].rstrip(b","),
    "lists": b"[%b]" % b",".join([b"[]"] * 100_000),
    "lists of numbers": b"[%b]" % b",".join([b"[1]"] * 100_000),
    "texts": b"[%b]" % b",".join([b'"a"'] * 30_000),
    "objects": b"[%b]" % b",".join([b'{"a":1}'] * 20_000),
}


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


@pytest.fixture(scope="module")
def unit_s() -> float:
    """Of parsing a list of 300,000 numbers."""
    return min(cpu_s(lambda: json.loads(VALUES["numbers"])) for _ in range(5))


def costs_s(work: Callable[[], object]) -> float:
    """Whether it is refused or not."""

    def attempt() -> None:
        with suppress(InvalidRequestError):
            work()

    return cpu_s(attempt)


def test_no_value_of_any_field_of_any_body_costs_hundreds_of_times_what_its_numbers_cost(unit_s):
    tried, dear, seen = 0, dict[str, float](), set[tuple[str, str]]()
    for path, body in BODIES.items():
        fields = {**dict.fromkeys((*PARAMETERS, "nobodys"), "any"), **body.model_fields}
        for name, kind_of in fields.items():
            if (name, str(kind_of)) in seen:
                continue
            seen.add((name, str(kind_of)))
            for kind, value in VALUES.items():
                content = b'{"model":"m","max_tokens":1,"%b":%b}' % (name.encode(), value)
                taken = costs_s(lambda body=body, content=content: body.read(content, BOUNDS)) / unit_s
                tried += 1
                if taken > MAX_PARSES:
                    dear[f"{path} {name}: {kind}"] = taken
    assert not dear
    assert tried > 300


def test_of_a_list_one_wrong_element_is_complained_about():
    """For each kind of list that a field may be, so that no complaint costs more than the body."""
    tried = 0
    for body in BODIES.values():
        for name, field in body.model_fields.items():
            kind = str(field.annotation)
            if ("list" in kind or "Listed" in kind) and "list[typing.Any]" not in kind:
                with pytest.raises(ValidationError) as caught:
                    body.model_validate_json(json.dumps({name: [0.5] * 1000}))
                assert caught.value.error_count() < 10, f"{body.__name__}.{name}"
                tried += 1
    assert tried > 10


@pytest.mark.parametrize("value", ['[%s,"a"]', '["a",%s]', '["a",[%s]]'])
def test_a_list_of_texts_may_not_be_as_long_as_one_of_numbers(value):
    content = b'{"prompt":%b}' % (value % ",".join(["1"] * 3000)).encode()
    with pytest.raises(InvalidRequestError, match=r"prompt = .*must have at most 2048 values"):
        CompletionBody.read(content, BOUNDS)


@pytest.mark.parametrize("element", ["[]", "1", '{"a":1}'])
def test_json_in_a_string_has_so_few_values_that_a_parser_is_soon_done(element):
    text = '{"a":[' + ",".join([element] * (MAX_VALUES + 1)) + "]}"
    with pytest.raises(InvalidRequestError, match=r"chat\.x = .*at most 65536 values"):
        json_object("chat.x", text)
    function = {"name": "f", "arguments": text}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    with pytest.raises(InvalidRequestError, match=r"chat\.messages\.tool_calls\.function\.arguments = .*at most 65536"):
        adapted(plain_messages([turn]), TemplateTraits())


def test_json_in_a_string_that_has_few_values_is_read():
    text = '{"a":[' + ",".join(["[1]"] * (MAX_VALUES // 2 - 2)) + "]}"
    assert len(json_object("chat.x", text)["a"]) == MAX_VALUES // 2 - 2
    assert isinstance(chat_request(ChatBody.made({"messages": [{"role": "user", "content": "x"}]})).chat, Chat)
