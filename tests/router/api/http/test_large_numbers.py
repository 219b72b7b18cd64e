"""Numbers beyond what a protocol carries, in every numeric field of every body: refused by name, never a fault."""

import json
from typing import Any, get_args

import pytest

from holdfast.router.api.http.bodies import ChatBody, CompletionBody, DetokenizeBody, Reads
from holdfast.router.api.http.messages_body import MessagesBody
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.worker.sampling_params import PARAMETERS
from tests.loops import on_a_loop
from tests.router.api.http.test_wishes import BY_PATH, api

BODIES: dict[str, type[Reads]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/responses": ResponsesBody,
    "/detokenize": DetokenizeBody,
}
VALUES = ["-1", str(2**31), str(2**32), str(2**63), str(2**64), "1e400", "-1e400", "NaN", "Infinity", "1.5", "1" * 400]
ENDLESS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
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
