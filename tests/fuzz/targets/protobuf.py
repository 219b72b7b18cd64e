"""Protobuf messages to every method of every gRPC service of a router, and the messages of links at both ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from holdfast.router.api.grpc import admin, server
from holdfast.router.api.grpc import standard_services as health
from holdfast.router.api.open_inference import servicer as open_inference
from holdfast.v1 import engine_pb2
from holdfast.worker.wire.link_requests import engine_request
from holdfast.worker.wire.link_responses import LinkMessageError, read_response
from tests.fuzz.refusals import MAX_TEXT, refused
from tests.fuzz.targets.json_bodies import Application, running

VOCAB_SIZE: Final = 256
ANSWER_S: Final = 20.0
MAX_ANSWERS: Final = 64
SERVICES: Final = (server.SERVICE, open_inference.SERVICE, admin.SERVICE, health.SERVICE)
METHODS: Final[tuple[MethodDescriptor, ...]] = tuple(method for service in SERVICES for method in service.methods)
ENDLESS: Final = frozenset(("Watch",))
FAULTS: Final = frozenset((grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS))


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """The first byte chooses a method, or an end of a link; the rest is the message."""
    with running() as application:

        def read(data: bytes) -> None:
            number, content = (data[0] if data else 0) % (len(METHODS) + 2), data[1:]
            if number < len(METHODS):
                application.run(called(application, METHODS[number], content))
            elif number == len(METHODS):
                as_replica(content)
            else:
                as_router(content)

        yield read


async def called(application: Application, method: MethodDescriptor, content: bytes) -> None:
    """Calls a method, and checks the status that it ends with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    channel = application.place.channel
    try:
        if method.client_streaming:
            await _read(channel.stream_stream(path)(iter([content]), timeout=ANSWER_S))
        elif method.server_streaming:
            most = 1 if method.name in ENDLESS else MAX_ANSWERS
            await _read(channel.unary_stream(path)(content, timeout=ANSWER_S), most)
        else:
            await channel.unary_unary(path)(content, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        assert error.code() not in FAULTS, f"{path}: {error.code()}: {error.details()}"  # noqa: PT017
        assert len(error.details() or "") <= MAX_TEXT, f"{path}: a long error"  # noqa: PT017


async def _read(call: object, most: int = MAX_ANSWERS) -> None:
    """The first answers. What goes on is left."""
    num_read = 0
    async for _ in call:  # type: ignore[attr-defined]
        num_read += 1
        if num_read == most:
            call.cancel()  # type: ignore[attr-defined]
            return


def as_replica(content: bytes) -> None:
    with suppress(DecodeError), refused():
        engine_request(engine_pb2.Submit.FromString(content), "link", VOCAB_SIZE)


def as_router(content: bytes) -> None:
    with suppress(DecodeError, LinkMessageError), refused():
        read_response(engine_pb2.LinkResponse.FromString(content))
