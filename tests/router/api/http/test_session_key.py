"""A key of the prompt cache goes where routing by session goes, in every API that has one."""

import http.client
import json

import pytest

from tests.router.api.http.served import served

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id"])
def test_it_is_no_sampling_parameter(field):
    with served() as place:
        host, port = place.address.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        for path, body in BODIES.items():
            said = json.dumps({"model": "fake", field: "one conversation", **body})
            connection.request("POST", path, said, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, (path, text)
        connection.close()
