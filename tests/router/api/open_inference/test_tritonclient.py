"""NVIDIA's own client, unmodified and in a process of its own; and its definition of the protocol against ours."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from holdfast.foreign import grpc_service_pb2, model_config_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.programs import printed_by
from tests.router.site import expected, site

pytestmark = pytest.mark.skipif(find_spec("tritonclient") is None, reason="tritonclient is not installed")

SCRIPT = Path(__file__).with_name("triton_client.py")


@on_a_loop
async def test_tritonclient_is_served_as_by_triton():
    async with site(await FakeReplica.start()) as place:
        found = await client_of(place)
        text = expected("hello", 1, 20)[1]
        assert found["asked"] == {
            "live": True,
            "ready": True,
            "model_ready": [True, False, False],
            "server": "holdfast",
            "inputs": [
                "text_input",
                "stream",
                "sampling_parameters",
                "exclude_input_in_output",
                "return_finish_reason",
                "return_cumulative_logprob",
                "return_logprobs",
                "return_num_input_tokens",
                "return_num_output_tokens",
            ],
            "decoupled": True,
            "input_types": ["TYPE_BOOL", "TYPE_STRING"],
        }
        assert found["unary"] == {"id": "7", "text": text, "finish_reason": "length", "num_output_tokens": 20}
        assert found["streamed"] == {str(number): expected(f"prompt {number}", 1, 20)[1] for number in range(8)}
        status, message, of_stream = found["failures"]
        assert status == "StatusCode.NOT_FOUND"
        assert "served: fake" in message
        assert "text_input" in of_stream
        assert found["asynchronous"] == text
        assert found["statistics"]["inference_count"] == "11"


@on_a_loop
async def test_the_program_of_the_documentation_prints_what_is_streamed():
    page = SCRIPT.parents[4].joinpath("docs/apis.md").read_text()
    (program,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "tritonclient" in text]
    async with site(await FakeReplica.start()) as place:
        output = await printed_by(sys.executable, "-c", program.replace("localhost:50051", place.router.address))
        (submit,) = place.replicas[0].submits
        assert output == expected("The capital of France is", submit.sampling_params.seed, 8)[1]


async def client_of(place) -> dict:
    return json.loads(await printed_by(sys.executable, str(SCRIPT), place.router.address, "fake"))


def test_every_message_is_that_of_tritons_definition():
    """Of its service file whole messages; of its configuration the fields that ours has."""
    from tritonclient.grpc import model_config_pb2 as their_config
    from tritonclient.grpc import service_pb2 as their_service

    for name, message in grpc_service_pb2.DESCRIPTOR.message_types_by_name.items():
        assert said_of(message) == said_of(their_service.DESCRIPTOR.message_types_by_name[name]), name
    for name, message in model_config_pb2.DESCRIPTOR.message_types_by_name.items():
        theirs = said_of(their_config.DESCRIPTOR.message_types_by_name[name])
        assert said_of(message).items() <= theirs.items(), name
    for name, enum in model_config_pb2.DESCRIPTOR.enum_types_by_name.items():
        assert values_of(enum) == values_of(their_config.DESCRIPTOR.enum_types_by_name[name]), name


def test_every_method_is_that_of_tritons_definition():
    from tritonclient.grpc import service_pb2 as their_service

    theirs = their_service.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, method in grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name.items():
        sides = [
            (item.input_type.full_name, item.output_type.full_name, item.client_streaming, item.server_streaming)
            for item in (method, theirs[name])
        ]
        assert sides[0] == sides[1], name


def said_of(message: Descriptor) -> dict[str, object]:
    """Its fields and those of the messages in it, with all that the wire depends on."""
    fields: dict[str, object] = {field.name: wire_of(field) for field in message.fields}
    return fields | {f"{nested.name}.": said_of(nested) for nested in message.nested_types}


def wire_of(field: FieldDescriptor) -> tuple:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    name = kind.full_name if kind else None
    return field.number, field.type, name, field.is_repeated, field.is_packed, field.has_presence, oneof


def values_of(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}
