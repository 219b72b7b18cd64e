"""Whole numbers of every size at the doors of a router: each works, or is refused with a message that names its field.

The fields are those that the protocols declare, so that a new one is tried as well. Settings are in
`tests/cluster/config/test_config.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from holdfast.router.chat import Chat
from holdfast.router.request import GenerationRequest
from holdfast.router.wire.request_codec import generation_request_message
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.parameters import BIASES, TOKEN_IDS
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.open_inference.messages import infer, unary
from tests.router.site import request, site

WHOLE: Final = (
    -(2**63) - 1,
    -(2**63),
    -(2**31) - 1,
    -1,
    0,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
)
KINDS: Final = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_ENUM,
)
CALLS: Final[Mapping[str, Callable[[], Message]]] = {
    "Generate": lambda: request(max_tokens=2),
    "Tokenize": lambda: inference_pb2.TokenizeRequest(text="hi"),
    "Detokenize": lambda: inference_pb2.DetokenizeRequest(token_ids=[104]),
    "Abort": lambda: inference_pb2.AbortRequest(request_id="nobody"),
}
"""A request of each method that has one."""

ALL: Final = ("max_tokens", "top_k", "truncate_prompt_tokens")
"""Parameters of which a large number means all."""


def whole_fields(message: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Each whole number in a message and in those in it."""
    for field in message.fields:
        if field.message_type is None:
            if field.cpp_type in KINDS:
                yield (*path, field)
        elif field.message_type.full_name != "google.protobuf.Struct":
            yield from whole_fields(field.message_type, (*path, field))


def set_at(message: Any, path: tuple[FieldDescriptor, ...], value: int) -> bool:
    """Whether the field of that path can hold the value; then it does."""
    field, *rest = path
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if rest[0].name == "key":
                getattr(message, field.name)[value] = 1
                return True
            return False
        if field.message_type is not None:
            inner = getattr(message, field.name)
            return set_at(inner.add() if field.is_repeated else inner, tuple(rest), value)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    except ValueError:
        return False
    return True


@on_a_loop
async def test_over_grpc():
    tried = 0
    async with site(await FakeReplica.start(step_s=0.0)) as place:
        for method, made in CALLS.items():
            for path in whole_fields(type(made()).DESCRIPTOR):
                for value in WHOLE:
                    asked = made()
                    if not set_at(asked, path, value) or (path[-1].name in ALL and value > 2):
                        continue
                    problem = await problem_of(getattr(place.stub, method)(asked, timeout=20))
                    names = {name for field in path for name in (field.name, field.name.removesuffix("s"))}
                    assert problem is None or any(name in problem for name in names), (path[-1].name, value, problem)
                    tried += 1
    assert tried > 80


async def problem_of(call: Any) -> str | None:
    """The message of a refusal. Any other error than a refusal is raised."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return error.details() or ""
    return None


def test_in_the_messages_of_clients():
    for value in WHOLE:
        for name in (*PARAMETERS, "now_s", "cache_ttl_s", "cache_prefix_tokens", "timeout_s"):
            problem = ""
            try:
                generation_request_message(with_number(name, value))
            except InvalidRequestError as error:
                problem = str(error)
            assert not problem or name.removesuffix("_s") in problem, (name, value, problem)


def with_number(name: str, value: int) -> GenerationRequest:
    """A request in which that field, or an element of it, has the value."""
    messages = [{"role": "user", "content": "hi"}]
    if name == "now_s":
        return GenerationRequest(chat=Chat(messages=messages, now_s=value))
    if name not in PARAMETERS:
        return GenerationRequest(prompt="hi", **{name: value})
    kind = PARAMETERS[name].kind
    given = {TOKEN_IDS: [value], BIASES: {value: 1.0}}.get(kind, value)
    return GenerationRequest(prompt="hi", sampling_params=SamplingParams(**{name: given}))


@on_a_loop
async def test_in_parameters_of_the_open_inference_protocol():
    async with site(await FakeReplica.start(step_s=0.0)) as place:
        call = unary(place, "ModelInfer")
        for name in (*PARAMETERS, "priority", "timeout"):
            for value in WHOLE:
                if name in ALL and value > 2:
                    continue
                given = [value] if PARAMETERS.get(name) and PARAMETERS[name].kind is TOKEN_IDS else value
                asked = [infer("hi", sampling={"max_tokens": 2, "seed": 1, name: given})] if name in PARAMETERS else []
                if -(2**63) <= value < 2**63:
                    asked.append(infer("hi", sampling={"max_tokens": 2}, parameters={name: value}))
                for one in asked:
                    problem = await problem_of(call(one, timeout=20))
                    assert problem is None or name in problem, (name, value, problem)
