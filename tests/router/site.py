"""A router on loopback with replicas behind it, and clients in front: what the tests of the whole router share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from benchmarks.static_directory import StaticDirectory
from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import byte_tokenizer, fake_tokens


@dataclass
class Site:
    """One router and what is around it."""

    router: Router
    directory: StaticDirectory
    replicas: list
    channel: grpc.aio.Channel
    key: str = ""
    """An operator's, where keys are asked for."""

    @property
    def stub(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    async def until_up(self, num_replicas: int) -> None:
        """Returns once the router has that many replicas."""

        async def is_so() -> bool:
            load = await self.stub.GetLoad(inference_pb2.GetLoadRequest(), metadata=with_key(self.key))
            return len(load.replicas) == num_replicas

        await eventually(is_so)

    async def until_idle(self) -> None:
        """Returns once the router and its replicas have nothing open."""

        async def is_so() -> bool:
            return self.router.num_open == 0 and all(replica.is_idle for replica in self.replicas)

        await eventually(is_so)


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.005)


class Replica(Protocol):
    """What a site needs to know of a replica, fake or real."""

    endpoint: ReplicaEndpoint

    @property
    def is_idle(self) -> bool: ...

    async def kill(self) -> None: ...


CALM = OverloadConfig(max_loop_delay_s=1000.0)
"""Other work on the machine is no load of a router that is tested."""


@asynccontextmanager
async def site(
    *replicas: Replica,
    config: RouterConfig | None = None,
    limits: LimitsConfig | None = None,
    load_tokenizer: Callable[[str], Tokenizer] = byte_tokenizer,
    http: bool = False,
    key: str = "",
    **options: object,
) -> AsyncIterator[Site]:
    """Up when all replicas are; with `http`, on a second port as well. Leaving it checks that nothing is left over:
    requests, links, tasks.
    """
    tasks_before = asyncio.all_tasks()
    directory = StaticDirectory(replica.endpoint for replica in replicas)
    router = await Router.start(
        config or RouterConfig(max_reconnect_s=0.1),
        limits or LimitsConfig(),
        directory,
        load_tokenizer=load_tokenizer,
        http_port=0 if http else None,
        **{"overload": CALM} | options,
    )
    channel = grpc.aio.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)])
    place = Site(router, directory, list(replicas), channel, key)
    try:
        await place.until_up(len(replicas))
        yield place
        await place.until_idle()
        router.check_integrity()
    finally:
        await channel.close()
        await router.stop()
        for replica in replicas:
            await replica.kill()
    assert router.num_open == 0

    async def nothing_is_left() -> bool:
        return asyncio.all_tasks() <= tasks_before

    await eventually(nothing_is_left)


def with_key(key: str) -> tuple[tuple[str, str], ...] | None:
    """The metadata of a call with an API key."""
    return (("authorization", f"Bearer {key}"),) if key else None


def request(
    prompt: str | list[int] = "hello", *, max_tokens: int = 8, seed: int = 1, **fields: object
) -> inference_pb2.GenerateRequest:
    given = {"text": prompt} if isinstance(prompt, str) else {"token_ids": inference_pb2.TokenIds(ids=prompt)}
    params = inference_pb2.SamplingParams(max_tokens=max_tokens, seed=seed)
    return inference_pb2.GenerateRequest(**({"sampling_params": params} | given | fields))


@dataclass(frozen=True)
class Refusal:
    """A failed call, with its details taken apart."""

    code: str
    message: str
    reason: str
    field: str | None
    retry_after_s: float | None


async def refusal(call: Awaitable[object]) -> Refusal:
    """What a call that must fail says."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return taken_apart(error)
    raise AssertionError(f"answered {answer}")


def taken_apart(error: grpc.aio.AioRpcError) -> Refusal:
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    return Refusal(
        code=error.code().name,
        message=error.details(),
        reason=info.reason,
        field=bad.field_violations[0].field if bad.field_violations else None,
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
    )


async def collected(call: AsyncIterator[inference_pb2.GenerateStreamResponse]) -> list:
    return [chunk async for chunk in call]


def expected(prompt: str, seed: int, num_tokens: int) -> tuple[list[int], str]:
    """Tokens and text that any fake replica answers with."""
    token_ids = fake_tokens(prompt.encode(), seed, num_tokens)
    return token_ids, bytes(token_ids).decode()


async def num_open_is(place: Site, count: int) -> bool:
    return place.router.num_open == count
