"""Connections to a router: their age, how many calls they carry, compression, and what metadata says."""

import grpc

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica, Wire
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import infer, unary, values
from tests.router.site import collected, eventually, expected, num_open_is, request, site

# --- metadata ---


@on_each_loop
async def test_the_request_id_of_the_metadata_holds_where_the_message_has_none():
    async with site(await FakeReplica.start()) as place:
        metadata = (("x-request-id", "from-proxy"),)
        answer = await place.stub.Generate(request(), metadata=metadata)
        assert answer.request_id == "from-proxy"
        call = place.stub.GenerateStream(request(), metadata=metadata)
        assert {chunk.request_id for chunk in await collected(call)} == {"from-proxy"}
        assert dict(await call.initial_metadata())["x-request-id"] == "from-proxy"
        assert (await place.stub.Generate(request(request_id="own"), metadata=metadata)).request_id == "own"
        assert (await place.stub.Generate(request())).request_id not in ("", "own", "from-proxy")


@on_a_loop
async def test_an_unseeded_request_draws_by_the_id_of_the_metadata():
    async with site(await FakeReplica.start()) as place:
        asked = inference_pb2.GenerateRequest(text="x", request_id="a")
        await place.stub.Generate(asked)
        await place.stub.Generate(inference_pb2.GenerateRequest(text="x"), metadata=(("x-request-id", "a"),))
        first, second = (submit.sampling_params.seed for submit in place.replicas[0].submits)
        assert first == second


@on_a_loop
async def test_grpcs_own_retries_are_told_when_to_come_again():
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=0)
    async with site(replica, config=config, limits=limits) as place:
        first = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        for call in (place.stub.Generate(request()), unary(place, "ModelInfer")(infer())):
            error = await failed(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        replica.resume()
        await first


@on_a_loop
async def test_a_router_without_replicas_says_when_to_come_again():
    replica = await FakeReplica.start()
    async with site(replica, config=RouterConfig(replica_wait_s=0)) as place:
        await replica.kill()
        await place.until_up(0)
        error = await failed(place.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0


async def failed(call) -> grpc.aio.AioRpcError:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"answered {answer}")


# --- connections ---


def own_connection(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *options])


@on_a_loop
async def test_a_connection_of_age_is_left_and_its_calls_go_on():
    """Calls that are open go on there; the next one is made on a new connection."""
    replica = await FakeReplica.start()
    replica.pause()
    config = RouterConfig(max_connection_age_s=0.2, max_reconnect_s=0.1)
    async with site(replica, config=config) as place, own_connection(place.router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GenerateStream(request(max_tokens=20))
        await call.initial_metadata()
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        replica.resume()
        chunks = await collected(call)
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected("hello", 1, 20)[0]
        assert (await stub.Generate(request())).usage.completion_tokens == 8


@on_a_loop
async def test_calls_that_go_on_after_the_grace_are_ended():
    replica = await FakeReplica.start()
    config = RouterConfig(max_connection_age_s=0.1, max_connection_age_grace_s=0.1, max_reconnect_s=0.1)
    async with site(replica, config=config) as place, own_connection(place.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request(max_tokens=10**6))
        assert (await failed(collected(call))).code() is grpc.StatusCode.UNAVAILABLE
        await replica.until(lambda: replica.aborted)


# --- compression ---


class CountingWire(Wire):
    """Counts the bytes that come back."""

    num_bytes = 0

    async def _pump(self, source, sink) -> None:
        comes_back = sink.get_extra_info("peername")[1] != self._target_port
        while data := await source.read(2**16):
            self.num_bytes += len(data) if comes_back else 0
            sink.write(data)
            await sink.drain()
        sink.close()


async def wire_to(place) -> CountingWire:
    return await CountingWire.start(int(place.router.address.rpartition(":")[2]))


@on_a_loop
async def test_large_whole_answers_are_gzipped_for_whoever_takes_it():
    async with site(await FakeReplica.start(), config=RouterConfig(gzip_above=2000, max_reconnect_s=0.1)) as place:
        asked = inference_pb2.TokenizeRequest(text="x" * 20_000)
        sizes = []
        for enabled in (0b111, 0b001):
            wire = await wire_to(place)
            options = ("grpc.compression_enabled_algorithms_bitset", enabled)
            async with own_connection(f"127.0.0.1:{wire.port}", options) as channel:
                answer = await inference_pb2_grpc.InferenceStub(channel).Tokenize(asked)
                assert len(answer.token_ids) == 20_000
            sizes.append(wire.num_bytes)
            await wire.stop()
        assert sizes[0] < 2_000 < 20_000 < sizes[1]


@on_a_loop
async def test_small_answers_and_streams_are_sent_as_they_are():
    async with site(await FakeReplica.start(), config=RouterConfig(gzip_above=2**20, max_reconnect_s=0.1)) as place:
        wire = await wire_to(place)
        async with own_connection(f"127.0.0.1:{wire.port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 20_000))
            assert len(answer.token_ids) == 20_000
            assert wire.num_bytes > 20_000
            chunks = await collected(stub.GenerateStream(request("a" * 500, max_tokens=20, request_id="a" * 120)))
            assert "".join(chunk.text for chunk in chunks) == expected("a" * 500, 1, 20)[1]
            assert wire.num_bytes > 20_000 + 120 * len(chunks)
        await wire.stop()


@on_a_loop
async def test_gzip_from_a_client_is_read_by_every_router():
    async with site(await FakeReplica.start()) as place:
        answer = await place.stub.Generate(request("x" * 50_000), compression=grpc.Compression.Gzip)
        assert answer.usage.prompt_tokens == 50_000
        packed = await unary(place, "ModelInfer")(infer("x" * 50_000), compression=grpc.Compression.Gzip)
        assert len(values(packed)["text_output"][0]) == 50_008
        await eventually(lambda: num_open_is(place, 0))
