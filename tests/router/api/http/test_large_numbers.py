"""Numbers beyond what a protocol carries, in every numeric field of every body: refused by name, never a fault."""

import json
from typing import Any, get_args

import pytest

from holdfast.router.api.http.bodies import ChatBody, CompletionBody, DetokenizeBody
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.messages_body import MessagesBody
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.worker.sampling_params import PARAMETERS
from tests.loops import on_a_loop
from tests.router.api.http.test_wishes import BY_PATH, api
from tests.router.api.test_whole_numbers import ALL, WHOLE

BODIES: dict[str, type[Reads]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/responses": ResponsesBody,
    "/detokenize": DetokenizeBody,
}
VALUES = [*map(str, WHOLE), "1e400", "-1e400", "NaN", "Infinity", "1.5", "1" * 400]
ENDLESS = (ALL[0], "max_completion_tokens", "max_output_tokens")
JSON = {"content-type": "application/json"}
NEEDED = {"/detokenize": {"tokens": [1]}, **BY_PATH}


def numeric_fields(path: str) -> list[str]:
    own = [name for name, field in BODIES[path].model_fields.items() if is_numeric(field.annotation)]
    return sorted({*own, *(PARAMETERS if path.startswith("/v1") else ())})


def is_numeric(kind: Any) -> bool:
    return kind in (int, float) or any(map(is_numeric, get_args(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
@on_a_loop
async def test_every_numeric_field_refuses_by_name_what_is_too_large(path: str):
    tried = 0
    async with api() as (client, _):
        for name in numeric_fields(path):
            for value in VALUES:
                if name in ENDLESS and float(value) > 1:
                    continue  # it means all that the context holds, which takes a while
                fields = {key: one for key, one in NEEDED[path].items() if key != name}
                plain = json.dumps({"model": "fake", **fields})
                content = f'{plain[:-1]}, "{name}": {value}}}'
                answer = await client.post(path, content=content, headers=JSON, timeout=60)
                assert answer.status_code in (200, 400), (name, value, answer.text)
                if answer.status_code == 400:
                    message = answer.json()["error"]["message"]
                    assert name in message or "body" in message, (name, value, message)
                tried += 1
    assert tried > 10


INSIDE = {
    "/v1/messages": [
        ("thinking", {"type": "enabled", "budget_tokens": ...}),
        ("stop_token_ids", [...]),
    ],
    "/v1/chat/completions": [
        ("logit_bias", {"97": ...}),
        ("allowed_token_ids", [...]),
        ("stop_token_ids", [...]),
        ("logprob_token_ids", [...]),
    ],
    "/v1/completions": [("prompt", [...]), ("prompt", [[...]]), ("logit_bias", {...: 1})],
    "/detokenize": [("tokens", [...])],
}
"""Numbers inside the values of fields, at the places of `...`."""


def filled(value: Any, number: int) -> Any:
    if value is ...:
        return number
    if isinstance(value, list):
        return [filled(one, number) for one in value]
    if isinstance(value, dict):
        return {str(number) if name is ... else name: filled(one, number) for name, one in value.items()}
    return value


@on_a_loop
async def test_numbers_inside_a_field_of_any_size_work_or_are_refused_by_its_name():
    async with api() as (client, _):
        for path, fields in INSIDE.items():
            for name, value in fields:
                for number in WHOLE:
                    body = {"model": "fake", "max_tokens": 1, **NEEDED[path], name: filled(value, number)}
                    answer = await client.post(path, json=body, timeout=60)
                    assert answer.status_code in (200, 400), (name, number, answer.text)
                    if answer.status_code == 400:
                        message = answer.json()["error"]["message"]
                        assert name in message or "budget_tokens" in message, (name, number, message)


@on_a_loop
async def test_numbers_in_queries_and_headers_of_any_size_work_or_are_refused():
    async with api() as (client, _):
        for number in WHOLE:
            for path in ("/v1/chat/completions?limit=%d", "/v1/responses/resp_1/input_items?limit=%d"):
                answer = await client.get(path % number)
                assert 400 <= answer.status_code < 500, (path, number, answer.text)
            for name in ("x-holdfast-resume", "x-holdfast-routers-lost", "x-stainless-timeout"):
                body = {"model": "fake", "max_tokens": 1, **NEEDED["/v1/completions"]}
                answer = await client.post("/v1/completions", json=body, headers={name: str(number)}, timeout=60)
                assert answer.status_code in (200, 400), (name, number, answer.text)
