"""What operators and balancers see: load reports with every call, channelz on a port of its own, and large messages."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpclib.client import Channel, ServiceMethod, StreamStreamMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import GRPCError

from benchmarks.static_directory import StaticDirectory
from holdfast.foreign import grpc_service_pb2, health_pb2, health_pb2_grpc, orca_load_report_pb2
from holdfast.router.api.grpc.channelz import ChannelzServicer
from holdfast.router.api.load_reports import LoadReports
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.server.router import Router
from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.open_inference.messages import infer
from tests.router.core import load
from tests.router.site import Site, collected, expected, refusal, request, site

# --- load reports ---


def report_of(trailers) -> orca_load_report_pb2.OrcaLoadReport | None:
    found = dict(trailers).get("endpoint-load-metrics-bin")
    return None if found is None else orca_load_report_pb2.OrcaLoadReport.FromString(found)


async def trailers_of(place: Site, kind: type[ServiceMethod], path: str, message: Message, answer: type[Message]):
    """Of a call by grpclib: gRPC's own core keeps load reports to itself."""
    host, _, port = place.router.address.rpartition(":")
    async with Channel(host, int(port)) as channel:
        call = kind(channel, path, type(message), answer).open()
        with suppress(GRPCError):
            async with call:
                await call.send_message(message, end=True)
                while await call.recv_message() is not None and kind is not UnaryUnaryMethod:
                    pass
        return call.trailing_metadata


@on_a_loop
async def test_every_call_ends_with_the_routers_load():
    ours, other = "/holdfast.v1.Inference", "/inference.GRPCInferenceService"
    calls = (
        (UnaryUnaryMethod, f"{ours}/Generate", request(), inference_pb2.GenerateResponse),
        (UnaryStreamMethod, f"{ours}/GenerateStream", request(), inference_pb2.GenerateStreamResponse),
        (UnaryUnaryMethod, f"{other}/ModelInfer", infer(), grpc_service_pb2.ModelInferResponse),
        (StreamStreamMethod, f"{other}/ModelStreamInfer", infer(), grpc_service_pb2.ModelStreamInferResponse),
        (UnaryUnaryMethod, f"{ours}/Generate", request(model="other"), inference_pb2.GenerateResponse),
    )
    async with site(await FakeReplica.start()) as place:
        for kind, path, message, answer in calls:
            report = report_of(await trailers_of(place, kind, path, message, answer))
            names = {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}
            assert report.named_metrics.keys() == names, path


@on_a_loop
async def test_reports_can_be_turned_off():
    async with site(await FakeReplica.start(), config=RouterConfig(load_reports=False)) as place:
        generate = UnaryUnaryMethod, "/holdfast.v1.Inference/Generate", request(), inference_pb2.GenerateResponse
        assert report_of(await trailers_of(place, *generate)) is None


class FakeHost:
    """Stands for the dispatch host and its core: a clock and loads."""

    num_queued = 2

    def __init__(self) -> None:
        self.time = 0.0
        self.dispatch = self

    def now(self) -> float:
        return self.time

    def loads(self):
        class Loaded:
            pass

        one = Loaded()
        one.load = load(num_running=4, num_waiting=2)
        return (one,)


def test_a_report_has_rates_of_the_last_seconds_and_work_that_waits():
    host = FakeHost()
    reports = LoadReports(host)
    for number in range(20):
        host.time += 0.5
        report = report_of(reports.trailers(is_error=number % 4 == 0))
    assert report.rps_fractional == pytest.approx(2.0)
    assert report.eps == pytest.approx(0.5)
    assert report.application_utilization == pytest.approx(1.0)  # no block in use, as much waits as runs
    assert report.named_metrics["num_requests_waiting"] == 4
    host.time += 100
    quiet = report_of(reports.trailers())
    assert quiet.rps_fractional < 0.1


def test_a_report_is_made_once_for_calls_that_end_together():
    host = FakeHost()
    reports = LoadReports(host)
    first = reports.trailers()
    assert reports.trailers() is first
    host.time += 1.0
    assert reports.trailers() is not first


# --- channelz ---


@on_a_loop
async def test_channelz_knows_the_routers_servers_and_connections_and_only_the_admin_port_tells():
    replica = await FakeReplica.start()
    router = await Router.start(
        RouterConfig(), LimitsConfig(), StaticDirectory([replica.endpoint]), load_tokenizer=byte_tokenizer, admin_port=0
    )
    async with grpc.aio.insecure_channel(router.admin_address) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        servers = (await stub.GetServers(channelz_pb2.GetServersRequest())).server
        listening = {socket.name.rpartition(":")[2] for server in servers for socket in server.listen_socket}
        assert len(servers) >= 2
        assert listening
        for server in servers:
            sockets = await stub.GetServerSockets(channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id))
            for ref in sockets.socket_ref:
                known = await stub.GetSocket(channelz_pb2.GetSocketRequest(socket_id=ref.socket_id))
                assert known.socket.ref.socket_id == ref.socket_id
        channels = (await stub.GetTopChannels(channelz_pb2.GetTopChannelsRequest())).channel
        assert any(channel.data.target.endswith(replica.endpoint.address) for channel in channels)
        unknown = await refusal(stub.GetServer(channelz_pb2.GetServerRequest(server_id=10**9)))
        assert unknown.code == "INVALID_ARGUMENT"
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
    async with grpc.aio.insecure_channel(router.address) as channel:
        refused = await refusal(channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest()))
        assert refused.code == "UNIMPLEMENTED"
    await router.stop()
    await replica.kill()


@on_a_loop
async def test_what_the_core_tells_beyond_the_definitions_is_left_out(monkeypatch):
    message = b'{"server": [], "end": true, "told_by_a_later_core": {"a": 1}}'
    monkeypatch.setattr(cygrpc, "channelz_get_servers", lambda start: message)
    answer = await ChannelzServicer().GetServers(channelz_pb2.GetServersRequest(), None)
    assert answer == channelz_pb2.GetServersResponse(end=True)


@on_a_loop
async def test_an_admin_port_that_is_taken_is_said():
    first = await Router.start(
        RouterConfig(), LimitsConfig(), StaticDirectory(), load_tokenizer=byte_tokenizer, admin_port=0
    )
    port = int(first.admin_address.rpartition(":")[2])
    with pytest.raises(RuntimeError):
        await Router.start(
            RouterConfig(), LimitsConfig(), StaticDirectory(), load_tokenizer=byte_tokenizer, admin_port=port
        )
    await first.stop()


# --- large messages, and pings ---


@on_a_loop
async def test_a_message_of_32_mb_is_read_and_what_is_too_long_in_it_is_named():
    """Stock clients send any size; the limit of gRPC itself would be 4 MB, and tell of no field."""
    async with site(await FakeReplica.start()) as place:
        limit = LimitsConfig().max_message_bytes
        message = inference_pb2.GenerateRequest(text="x" * (limit - 100))
        assert limit - 1024 < message.ByteSize() < limit
        refused = await refusal(place.stub.Generate(message))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "text")
        message.text += "x" * 1024
        assert (await refusal(place.stub.Generate(message))).code == "RESOURCE_EXHAUSTED"
        assert (await place.stub.Generate(request())).completions[0].text


@pytest.mark.slow
@on_a_loop
async def test_a_client_that_pings_every_second_keeps_its_connection():
    """With gRPC's own settings a server ends such a connection after a few seconds of silence: too many pings."""
    replica = await FakeReplica.start()
    options = [
        ("grpc.keepalive_time_ms", 1_100),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    async with site(replica) as place, grpc.aio.insecure_channel(place.router.address, options=options) as channel:
        stream = type(place.stub)(channel).GenerateStream(request(max_tokens=80, seed=4))
        first = await anext(aiter(stream))
        replica.pause()
        await asyncio.sleep(5)  # of pings, which is what this is about
        replica.resume()
        chunks = [first, *await collected(stream)]
        assert "".join(chunk.text for chunk in chunks) == expected("hello", 4, 80)[1]


# --- the start ---


@on_a_loop
async def test_what_is_done_before_a_router_opens_is_done_before_its_first_port():
    seen: list[tuple[str, str, str]] = []

    def before_opening(router: Router) -> None:
        seen.append((router.address, router.http_address, router.admin_address))

    router = await Router.start(
        RouterConfig(), LimitsConfig(), StaticDirectory([]), http_port=0, admin_port=0, before_opening=before_opening
    )
    assert seen == [("", "", "")]
    assert all((router.address, router.http_address, router.admin_address))
    await router.stop()
