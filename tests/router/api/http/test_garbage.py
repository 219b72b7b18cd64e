"""A refused request is gone when it is answered: an error in a cycle would keep its body until the next collection,
which then holds up the event loop.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.loops import on_a_loop
from tests.router.api.http.test_wishes import BY_PATH, REFUSED, api

OTHERS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}, 7]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}] * 500}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}], "tools": [{}] * 900}),
    ("/v1/completions", {"guided_json": [{"a": 1}] * 3000}),
    ("/v1/completions", {"guided_json": {"type": "strin", "x": ["x"] * 3000}}),
    ("/v1/completions", {"prompt": "x" * 9000, "temperature": -1}),
    ("/v1/responses", {"input": [{"type": "nonsense", "content": "x" * 5000}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 5000}], "tools": [{}] * 900}),
    ("/tokenize", {"messages": [{"role": "nonsense?", "content": "x" * 5000}]}),
]
CASES = [*((path, fields) for path, fields, *_ in REFUSED), *OTHERS]


@contextmanager
def garbage() -> Iterator[list[object]]:
    """What was unreachable but for a collection."""
    gc.collect()
    gc.freeze()  # what is there before is not looked at
    gc.disable()
    found: list[object] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


@on_a_loop
async def test_no_error_of_a_refused_request_is_garbage():
    async with api() as (client, _):
        with garbage() as found:
            for path, fields in CASES:
                content = json.dumps({"model": "fake", **BY_PATH.get(path, {}), **fields})
                answer = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code == 400, answer.text
        assert not [repr(one)[:200] for one in found if isinstance(one, BaseException)]
