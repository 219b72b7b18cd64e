"""A router that protects itself, over both of its protocols: what it refuses, what it never does, what it tells."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import httpx
import pytest

from holdfast.foreign import health_pb2, health_pb2_grpc
from holdfast.router.api import overload_probe
from holdfast.router.config import LimitsConfig, OverloadConfig
from holdfast.router.overload import overload as overload_module
from holdfast.router.overload.overload import OverloadAction
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import Site, collected, eventually, expected, refusal, request, site

MEMORY = 2**30
COMPLETION = {"prompt": "x", "max_tokens": 1}
SHED_NEW, SHED_LOW, STOP, CALM, FULL = 0.93, 0.86, 0.81, 0.1, 1.0


@dataclass
class Pressed:
    """A router whose memory is what a test says."""

    place: Site
    resident: dict[str, float]
    http: httpx.AsyncClient

    async def press(self, pressure: float) -> None:
        """Returns once the probe has seen it."""
        self.resident["is"] = pressure

        async def is_seen() -> bool:
            return self.place.router.overload.pressures["memory"] == pytest.approx(pressure)

        await eventually(is_seen)

    @asynccontextmanager
    async def new_channel(self) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(self.place.router.address, options=own) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    async def new_http(self, method: str, path: str, **fields: object) -> httpx.Response:
        """Over a connection of its own."""
        async with httpx.AsyncClient(base_url=self.http.base_url) as client:
            return await client.request(method, path, **fields)


@asynccontextmanager
async def pressed(
    monkeypatch: pytest.MonkeyPatch, replica: FakeReplica, limits: LimitsConfig | None = None, **overload: object
) -> AsyncIterator[Pressed]:
    resident = {"is": CALM}
    monkeypatch.setattr(overload_probe, "resident_memory", lambda: round(resident["is"] * MEMORY))
    monkeypatch.setattr(overload_module, "IDLE_S", 0.02)
    monkeypatch.setattr(overload_module, "BUSY_S", 0.02)
    # A busy machine's loop is late: these tests are of memory alone.
    config = OverloadConfig(**{"max_memory": MEMORY, "max_loop_delay_s": 1000.0} | overload)
    async with (
        site(replica, http=True, limits=limits, overload=config) as place,
        httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as http,
    ):
        assert (await http.get("/health")).content == b""  # its connection is known
        yield Pressed(place, resident, http)


@on_a_loop
async def test_new_requests_are_shed_by_priority_and_resumed_ones_last(monkeypatch):
    low = request(priority=inference_pb2.PRIORITY_LOW)
    async with pressed(monkeypatch, await FakeReplica.start()) as router:
        stub, http = router.place.stub, router.http
        token_ids, _ = expected("hello", 1, 8)
        seen = inference_pb2.Resume(sequences=[inference_pb2.SequenceProgress(token_ids=token_ids[:3], text_length=3)])
        resumed = request(resume=seen, request_id="r")
        await router.press(SHED_LOW)
        refused = await refusal(stub.Generate(low))
        assert (refused.code, refused.reason, refused.retry_after_s) == ("UNAVAILABLE", "OVERLOADED", 2.0)
        assert "memory 86% of overload.max_memory; overload.shed_low_at" in refused.message
        assert (await stub.Generate(request())).completions[0].text
        await router.press(SHED_NEW)
        assert (await refusal(stub.Generate(request()))).reason == "OVERLOADED"
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["code"] == "overloaded"
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 503
        chunks = await collected(stub.GenerateStream(resumed))
        assert [one for chunk in chunks for one in chunk.token_ids] == token_ids[3:]
        await router.press(FULL)
        assert (await refusal(collected(stub.GenerateStream(resumed)))).reason == "OVERLOADED"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        assert (await stub.GetLoad(inference_pb2.GetLoadRequest())).replicas
        await router.press(CALM)
        assert (await stub.Generate(low)).completions[0].text


@on_a_loop
async def test_new_connections_get_health_operators_and_resumed_streams_alone(monkeypatch):
    async with pressed(monkeypatch, await FakeReplica.start()) as router:
        await router.press(STOP)
        async with router.new_channel() as stub:
            refused = await refusal(stub.Generate(request()))
            assert (refused.code, refused.reason, refused.retry_after_s) == ("UNAVAILABLE", "OVERLOADED", 2.0)
            assert "takes no new connections" in refused.message
        async with grpc.aio.insecure_channel(router.place.router.address) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == 1
        assert (await router.place.stub.Generate(request())).completions[0].text, "a connection that was there"
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert (await router.new_http("GET", "/health")).status_code == 200
        assert "holdfast_overload_action_active" in (await router.new_http("GET", "/metrics")).text
        refused = await router.new_http("POST", "/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        await router.press(CALM)
        assert (await router.new_http("POST", "/v1/completions", json=COMPLETION)).status_code == 200
        assert router.place.router.overload.counts[OverloadAction.STOP_ACCEPTING] == 2


@on_a_loop
async def test_guests_are_few_and_each_has_one_request(monkeypatch):
    monkeypatch.setattr("holdfast.router.api.http.server.MAX_GUESTS", 2)
    async with pressed(monkeypatch, await FakeReplica.start()) as router:
        await router.press(STOP)
        host, _, port = router.place.router.http_address.rpartition(":")
        guests = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        reader, _ = guests[0]
        guests[0][1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.read(), "and then it is closed"

        async def one_has_left() -> bool:
            return len(router.place.router._ports._http_server._server.config.guests) == 1

        await eventually(one_has_left)
        guests.append(await asyncio.open_connection(host, int(port)))
        third, writer = await asyncio.open_connection(host, int(port))
        answer = await third.read()
        assert b" 503 " in answer
        assert b"retry-after: 2" in answer
        assert b"takes no new connections" in answer
        for _, open_one in (*guests, (third, writer)):
            open_one.close()


@on_a_loop
async def test_what_a_router_refuses_is_told_everywhere(monkeypatch):
    async with pressed(monkeypatch, await FakeReplica.start()) as router:
        await router.press(SHED_NEW)
        await refusal(router.place.stub.Generate(request()))
        health = (await router.http.get("/health")).json()["warnings"]
        assert any("overloaded (memory 93%" in one and "shed_new" in one for one in health)
        metrics = (await router.http.get("/metrics")).text
        assert 'holdfast_overload_pressure_ratio{resource="memory"} 0.9' in metrics
        assert 'holdfast_overload_action_active{action="shed_new"} 1.0' in metrics
        assert 'holdfast_overload_action_active{action="close_greediest"} 0.0' in metrics
        assert 'holdfast_overload_actions_total{action="shed_new"} 1.0' in metrics
        assert 'holdfast_requests_total{model="",outcome="overload"} 1.0' in metrics
        overload = (await router.http.get("/cluster")).json()["overload"]
        assert overload["active"]["shed_new"] == "memory"
        assert overload["counts"]["shed_new"] == 1
        dump = json.loads(router.place.router._dump())
        assert dump["overload"]["pressures"]["memory"] == pytest.approx(0.93)
        assert dump["settings"]["overload"]["max_memory"] == MEMORY
        await router.press(CALM)
        assert (await router.http.get("/health")).content == b""


# --- bytes in flight ---

MIB = 2**20


async def _sending(place: Site, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A body that arrives but for its last byte."""
    host, _, port = place.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {num_bytes + 1}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode())
    writer.write(b" " * num_bytes)
    with suppress(ConnectionError):
        await writer.drain()
    return reader, writer


@on_a_loop
async def test_bytes_in_flight_have_budgets_and_come_back(monkeypatch):
    small = {"max_connection_bytes": 2 * MIB, "max_key_bytes": 3 * MIB, "max_router_bytes": 8 * MIB}
    limits = LimitsConfig(max_message_bytes=4 * MIB)
    async with pressed(monkeypatch, await FakeReplica.start(), limits, **small) as router:
        ledger = router.place.router.overload.ledger
        reader, writer = await _sending(router.place, 2 * MIB + 1)
        answer = await reader.readuntil(b"}}")
        assert b" 429 " in answer.split(b"\r\n")[0]
        assert b"overload.max_connection_bytes" in answer
        writer.close()
        held = [await _sending(router.place, MIB) for _ in range(3)]

        async def all_is_there() -> bool:
            return ledger.num_bytes == 3 * MIB

        await eventually(all_is_there)
        assert ledger.greediest() is not None
        answer = await router.http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "byte_budget")
        assert "this key or address has 3145728 bytes" in answer.json()["error"]["message"]
        refused = await refusal(router.place.stub.Generate(request("x" * 1000)))
        assert (refused.code, refused.reason, refused.retry_after_s) == ("RESOURCE_EXHAUSTED", "BYTE_BUDGET", 1.0)
        for _, one in held:
            one.transport.abort()

        async def all_is_back() -> bool:
            return ledger.num_bytes == ledger.num_leases == 0

        await eventually(all_is_back)
        ledger.check_integrity()
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


@on_a_loop
async def test_what_a_stream_has_sent_is_given_back_while_it_is_read(monkeypatch):
    replica = await FakeReplica.start()
    async with pressed(monkeypatch, replica) as router:
        replica.pause()
        call = router.place.stub.GenerateStream(request("x" * 10_000))
        streaming = asyncio.create_task(collected(call))
        await replica.until(lambda: bool(replica.running))
        ledger = router.place.router.overload.ledger
        assert (ledger.num_bytes, ledger.num_leases) == (0, 1)
        assert ledger.num_given_back > 10_000
        replica.resume()
        await streaming


@on_a_loop
async def test_the_greediest_is_ended_with_an_error_and_nobody_else(monkeypatch):
    """A body of a megabyte that does not end, beside a modest one and a stream that is read."""
    replica = await FakeReplica.start(step_s=0.005)
    async with pressed(monkeypatch, replica) as router:
        stream = asyncio.create_task(collected(router.place.stub.GenerateStream(request(max_tokens=200))))
        await replica.until(lambda: bool(replica.submits))
        greedy, greedy_writer = await _sending(router.place, MIB)
        _, modest_writer = await _sending(router.place, 1000)
        ledger = router.place.router.overload.ledger

        async def both_are_there() -> bool:
            return ledger.num_bytes == MIB + 1000

        await eventually(both_are_there)
        await router.press(0.98)
        answer = await greedy.readuntil(b"}}")
        assert b" 429 " in answer.split(b"\r\n")[0]
        assert b"this request was ended: it held 1048576 bytes" in answer
        await router.press(CALM)
        assert router.place.router.overload.counts[OverloadAction.CLOSE_GREEDIEST] == 1
        assert ledger.num_bytes == 1000
        chunks = await stream
        assert [one for chunk in chunks for one in chunk.token_ids] == expected("hello", 1, 200)[0]
        for writer in (greedy_writer, modest_writer):
            writer.close()


# --- the probe ---


@on_a_loop
async def test_memory_is_given_back_under_pressure(monkeypatch):
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(overload_probe, "give_back", lambda: loop.call_soon_threadsafe(given_back.set))
    async with pressed(monkeypatch, await FakeReplica.start()) as router:
        await router.press(0.75)
        async with asyncio.timeout(10):
            await given_back.wait()
        assert (await router.place.stub.Generate(request())).completions[0].text


def test_memory_is_measured_and_bounded():
    assert overload_probe.resident_memory() > 2**20
    assert overload_probe.max_memory(OverloadConfig(max_memory=2**27)) == 2**27
    assert 0 < overload_probe.max_memory(OverloadConfig()) <= overload_probe.MAX_MEMORY
