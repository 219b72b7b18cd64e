"""The endpoint picker: what it chooses, and Envoy's protocol, spoken by a client in Envoy's place."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.foreign import external_processor_pb2 as pb
from holdfast.foreign import external_processor_pb2_grpc, health_pb2, health_pb2_grpc
from holdfast.router.api.grpc.endpoint_picker import EndpointPicker, picked
from holdfast.router.config import RouterConfig
from holdfast.router.links.replica_directory import RouterEndpoint
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.test_keys_by_api import locked
from tests.router.site import eventually, refusal, site

PICKS = RouterConfig(endpoint_picker=True, max_reconnect_s=0.1)
HEADERS = pb.ProcessingRequest(request_headers=pb.HttpHeaders())
DUPLEX = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED)

addresses = st.integers(1, 254).map(lambda number: f"10.0.0.{number}:8000")


# --- the choice ---


@given(loads=st.dictionaries(addresses, st.integers(0, 50), max_size=12), seed=st.integers(0, 9))
def test_the_first_is_the_less_loaded_of_a_pair_and_the_others_stand_by(loads, seed):
    found = picked(loads, random.Random(seed).randrange)
    assert len(found) == len(set(found)) == min(3, len(loads))
    assert set(found) <= loads.keys()
    if len(loads) > 1:
        assert loads[found[0]] <= loads[found[1]]
        assert (
            found[0] != max(loads, key=lambda one: (loads[one], one))
            or list(loads.values()).count(max(loads.values())) > 1
        )


def test_requests_spread_over_routers_between_two_words_of_their_loads():
    picker = EndpointPicker(lambda: None, random.Random(1).randrange)
    picker.set_routers([RouterEndpoint(address=f"10.0.0.{number}:8000") for number in range(4)])
    firsts = [picker.pick()[0] for _ in range(400)]
    assert all(80 < firsts.count(one) < 120 for one in set(firsts))
    assert len(set(firsts)) == 4
    busy = RouterEndpoint(address="10.0.0.0:8000", num_open=1000)
    picker.set_routers([busy, *(RouterEndpoint(address=f"10.0.0.{number}:8000") for number in range(1, 4))])
    assert all(picker.pick()[0] != busy.address for _ in range(200))


def test_a_router_without_replicas_gets_nothing():
    picker = EndpointPicker(lambda: None, random.Random(1).randrange)
    picker.set_routers([RouterEndpoint(address="10.0.0.1:8000", has_replicas=False)])
    assert picker.pick() == []


def test_a_router_knows_its_own_load_better_than_the_directory():
    own = RouterEndpoint(address="10.0.0.1:8000", num_open=30)
    picker = EndpointPicker(lambda: own, random.Random(1).randrange)
    picker.set_routers([RouterEndpoint(address="10.0.0.1:8000"), RouterEndpoint(address="10.0.0.2:8000")])
    assert [picker.pick()[0] for _ in range(10)] == ["10.0.0.2:8000"] * 10


# --- the protocol ---


async def asked(place, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
    stub = external_processor_pb2_grpc.ExternalProcessorStub(place.channel)

    async def each():
        for message in messages:
            yield message

    return [response async for response in stub.Process(each())]


def destination(response: pb.ProcessingResponse) -> str:
    """Said twice, and both times alike."""
    (option,) = response.request_headers.response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    message = option.header.raw_value.decode()
    lb = response.dynamic_metadata.fields["envoy.lb"].struct_value
    assert lb.fields["x-gateway-destination-endpoint"].string_value == message
    return message


def hinted(*subset: str) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders())
    values = [pb.Value(string_value=one) for one in subset]
    hint = pb.Struct(fields={"x-gateway-destination-endpoint-subset": pb.Value(list_value=pb.ListValue(values=values))})
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return message


@on_a_loop
async def test_a_request_is_sent_to_a_router_that_has_a_replica():
    async with site(await FakeReplica.start(), http=True, config=PICKS) as place:
        own = place.router.http_address
        (alone,) = await asked(place, HEADERS)
        assert destination(alone) == own
        other = "10.0.0.9:8000"
        endpoints = [replica.endpoint for replica in place.replicas]
        place.directory.set(endpoints, routers=[RouterEndpoint(address=other), RouterEndpoint(address=own)])

        async def both() -> bool:
            return set(destination((await asked(place, HEADERS))[0]).split(",")) == {own, other}

        await eventually(both)
        (chosen,) = await asked(place, hinted("10.0.0.1:8000", other))
        assert destination(chosen) == other


@on_a_loop
async def test_where_no_router_may_be_chosen_the_client_is_told_to_come_again():
    async with site(await FakeReplica.start(), http=True, config=PICKS) as place:
        refused = [response for hint in (hinted(), hinted("10.0.0.1:8000")) for response in await asked(place, hint)]
        await place.replicas[0].kill()
        await place.until_up(0)
        refused += await asked(place, HEADERS)
        for response in refused:
            immediate = response.immediate_response
            assert immediate.status.code == 503
            assert json.loads(immediate.body)["error"]["code"] == "replica_unavailable"
            headers = {one.header.key: one.header.raw_value for one in immediate.headers.set_headers}
            assert headers == {"content-type": b"application/json", "retry-after": b"1"}


@on_a_loop
async def test_bodies_come_back_where_they_must_and_nowhere_else():
    parts = {
        "request_body": pb.HttpBody(body=b"\x00 first", end_of_stream=False),
        "request_trailers": pb.HttpTrailers(),
        "response_headers": pb.HttpHeaders(),
        "response_body": pb.HttpBody(body=b"last", end_of_stream=True),
        "response_trailers": pb.HttpTrailers(),
    }
    messages = [pb.ProcessingRequest(**{name: part}) for name, part in parts.items()]
    async with site(await FakeReplica.start(), http=True, config=PICKS) as place:
        first = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), protocol_config=DUPLEX)
        for opening in (first, HEADERS):
            responses = await asked(place, opening, *messages)
            assert [one.WhichOneof("response") for one in responses] == ["request_headers", *parts]
            for name in ("request_body", "response_body"):
                (answer,) = [getattr(one, name) for one in responses if one.HasField(name)]
                chunk = answer.response.body_mutation.streamed_response
                wanted = parts[name] if opening is first else pb.HttpBody()
                assert (chunk.body, chunk.end_of_stream) == (wanted.body, wanted.end_of_stream)
        observed = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), observability_mode=True)
        assert await asked(place, observed) == []
        refused = await refusal(asked(place, pb.ProcessingRequest()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "request")


@on_a_loop
async def test_gateways_ask_for_health_by_names_of_their_own():
    async with site(await FakeReplica.start(), http=True, config=PICKS) as place:
        health = health_pb2_grpc.HealthStub(place.channel)

        async def states() -> list[int]:
            names = ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
            return [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await states() == [serving] * 3
        await place.replicas[0].kill()
        await place.until_up(0)
        assert await states() == [serving, not_serving, not_serving]


@pytest.mark.parametrize("picks", [True, False])
@on_a_loop
async def test_a_gateway_needs_no_key_and_nobody_is_told_of_routers_unless_it_was_asked_for(picks):
    config = RouterConfig(endpoint_picker=picks, max_reconnect_s=0.1)
    async with site(await FakeReplica.start(), http=True, config=config, **locked()) as place:
        if picks:
            assert destination((await asked(place, HEADERS))[0]) == place.router.http_address
        else:
            assert (await refusal(asked(place, HEADERS))).code == "UNIMPLEMENTED"
