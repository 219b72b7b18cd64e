"""A canary is audited by its own answers, whatever the other version answers."""

import asyncio
import json

import httpx
import pytest

from holdfast.cluster.serve import canary_audit
from holdfast.cluster.serve.canary_audit import CanaryAudit, CanaryTransport, audited, own_id
from holdfast.cluster.verify.exchange import Ask
from holdfast.cluster.verify.transport import Budget
from holdfast.router.dispatch.versions import position
from tests.cluster.verify.planted import Planted

OLD, NEW = "0" * 8, "1" * 8
SHARE = 0.25


class TwoVersions(httpx.AsyncBaseTransport):
    """The old version answers what is not in the canary's share, and every few requests of it."""

    def __init__(self, fault: str, canarys_share: int = 3) -> None:
        self.versions = {OLD: Planted("ignores stop"), NEW: Planted(fault)}
        self.canarys_share = canarys_share
        self.num_asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        await request.aread()
        body = json.loads(request.content or b"{}")
        is_in_share = position(body.get("request_id", "")) < SHARE
        has_room = self.canarys_share and self.num_asked % self.canarys_share
        version = NEW if is_in_share and has_room else OLD
        response = await self.versions[version].handle_async_request(request)
        content = await response.aread()
        mark = f'"system_fingerprint": "base/tp1/{version}", "id"'.encode()
        headers = {"content-type": response.headers.get("content-type", "")}
        return httpx.Response(response.status_code, content=content.replace(b'"id"', mark), headers=headers)


def test_ids_fall_into_the_share():
    assert all(position(own_id(SHARE)) < SHARE for _ in range(20))


@pytest.mark.parametrize(
    ("fault", "name"), [("", None), ("wrong finish", "finish.wrong"), ("ignores seeds", "seed.ignored")]
)
def test_faults_of_the_canary_are_found_and_those_of_the_old_version_are_not(
    fault: str, name: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(canary_audit, "Budget", lambda rate: Budget(rate=1e5))  # nobody else asks these versions
    found = audited("http://router", "", "base", NEW, SHARE, inner=TwoVersions(fault))
    assert {one.partition(":")[0] for one in found.found} == ({name} if name else set())
    assert found.num_answers > 100


def test_a_canary_without_room_has_no_finding():
    assert audited("http://router", "", "base", NEW, SHARE, inner=TwoVersions("wrong usage", 0)) == CanaryAudit([], 0)


def test_answers_of_another_version_are_void():
    async def run() -> int:
        transport = CanaryTransport("http://router", "", NEW, SHARE, inner=TwoVersions("", 0))
        body = {"model": "base", "prompt": "x", "max_tokens": 1, "temperature": 0}
        (answer,) = await transport.send([Ask(path="completions", body=body)])
        await transport.close()
        return answer.is_ok

    assert not asyncio.run(run())
