"""Messages and bodies of any size that are hostile in one field, generated from the schemas of every API."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_reflection.v1alpha import reflection_pb2

from holdfast.foreign import external_processor_pb2, grpc_service_pb2, health_pb2, vllm_engine_pb2
from holdfast.router.api.http.admin import AdminEndpoints
from holdfast.router.api.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.messages_body import CountBody, MessagesBody
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.v1 import admin_pb2, inference_pb2
from holdfast.worker.sampling_params import PARAMETERS

FILES = (
    inference_pb2,
    admin_pb2,
    grpc_service_pb2,
    vllm_engine_pb2,
    external_processor_pb2,
    health_pb2,
    reflection_pb2,
    channelz_pb2,
)
SERVICES: list[ServiceDescriptor] = [one for file in FILES for one in file.DESCRIPTOR.services_by_name.values()]
REQUESTS: dict[str, Descriptor] = {
    method.input_type.full_name: method.input_type for service in SERVICES for method in service.methods
}
BODIES: dict[str, type[Reads]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    **{path: body for path, (body, _) in AdminEndpoints.bodies.items() if "{" not in path},
}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: (_FIXED64, bytes(8)),
    FieldDescriptor.TYPE_FLOAT: (_FIXED32, bytes(4)),
}


@dataclass(frozen=True)
class Hostile:
    """One message or body."""

    api: str
    """The message's name, or a path."""
    field: str
    data: bytes


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def hostile_messages(size: int) -> Iterator[Hostile]:
    """For each field of each request of each service, as often, or as long, as `size` allows. A message that stands in
    several places is filled in the first.
    """
    filled = set[str]()
    for name, message in REQUESTS.items():
        for path, wraps in paths(message):
            if wraps[-1].full_name in filled:
                continue
            filled.add(wraps[-1].full_name)
            for data in _fillings(wraps[-1], size - 64):
                whole = data
                for field in reversed(wraps[:-1]):
                    whole = varint(field.number << 3 | _LENGTH) + varint(len(whole)) + whole
                yield Hostile(name, path, whole)


def paths(
    message: Descriptor, name: str = "", wraps: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[FieldDescriptor, ...]]]:
    for field in message.fields:
        path = f"{name}.{field.name}" if name else field.name
        yield path, (*wraps, field)
        inner = field.message_type
        if inner is not None and inner not in [one.message_type for one in wraps]:
            yield from paths(inner, path, (*wraps, field))


def _fillings(field: Any, size: int) -> Iterator[bytes]:
    tag = field.number << 3
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        yield varint(tag | _LENGTH) + varint(size) + b"a" * size
        yield _repeated(varint(tag | _LENGTH) + b"\1a", size)
    elif field.message_type is not None:
        yield _repeated(varint(tag | _LENGTH) + b"\0", size)
    else:
        wire_type, value = _FIXED.get(field.type, (_VARINT, b"\1"))
        yield _repeated(varint(tag | wire_type) + value, size)
        if field.is_repeated:
            yield varint(tag | _LENGTH) + varint(size // 8 * 8) + b"\0" * (size // 8 * 8)


def _repeated(part: bytes, size: int) -> bytes:
    return part * (size // len(part))


def hostile_bodies(size: int) -> Iterator[Hostile]:
    """For each field of each body, and one that nobody has declared: values of any kind, as large as `size` allows.
    Fields of one name in several bodies are filled once.
    """
    values, filled = list(_json_values(size - 100)), set[str]()
    for path, body in BODIES.items():
        for name in {**body.model_fields, **PARAMETERS, "nobodys": None}.keys() - filled:
            filled.add(name)
            for value in values:
                yield Hostile(path, name, b'{"a":"m","%b":%b}' % (name.encode(), value))


def _json_values(size: int) -> Iterator[bytes]:
    yield b'"%b"' % (b"a" * size)
    yield b'"%b"' % (b"\\n" * (size // 2))
    for element in (b"1", b'""', b"{}", b"[1]", b'{"a":"b"}'):
        yield b"[%b%b]" % ((element + b",") * (size // (len(element) + 1)), element)
    yield b"[" * size
    yield b"9" * size
    numbers = json.dumps({str(number): 1.0 for number in range(1000)}).encode()[1:-1]
    yield b"{%b}" % b",".join([numbers] * (size // (len(numbers) + 1)))
