"""HTTP/2 frames on a connection to the gRPC port, after the preface: the server lives, and serves others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fuzz.targets.connections import said_to
from tests.fuzz.targets.json_bodies import Application, running

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
ANSWER_S: Final = 20.0


@contextmanager
def opened() -> Iterator[Callable[[bytes], None]]:
    """An input is what follows on the client's first SETTINGS."""
    with running() as application:
        address = application.place.router.address

        def read(data: bytes) -> None:
            application.run(said_to(address, PREFACE + SETTINGS + data))
            application.run(is_serving(application))

        yield read


async def is_serving(application: Application) -> None:
    """Asks on a connection of its own."""
    stub = health_pb2_grpc.HealthStub(application.place.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer
