"""A router's end of a link, reduced to what tests of the replica's end look at, and an engine that is served to it."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import grpc

from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.config import HealthConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.link_server import LinkServer
from tests import loops

NUM_BLOCKS, BLOCK_SIZE, TIMEOUT_S = 6000, 4, 20

INFO = ModelInfo(
    model="pseudo",
    path="/nowhere",
    model_type="pseudo",
    max_model_len=20_000,  # so that a request without a limit is still running when the test gets to it
    vocab_size=1000,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    kv_bytes_per_token=8,
    row_invariant=True,
    answers_digest=b"bits",
)


class Router:
    """A router's end of the link, reduced to what these tests look at."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._call = engine_pb2_grpc.EngineStub(self._channel).Link()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.prompt_logprobs: dict[int, list[float]] = defaultdict(list)
        self.finished: dict[int, int] = {}
        self.rejected: dict[int, engine_pb2.Rejection] = {}
        self.heartbeats: list[engine_pb2.Heartbeat] = []
        self.load: engine_pb2.Load | None = None
        self.cached: set[int] = set()
        self.stats: engine_pb2.EngineStats | None = None
        self.max_cache_events = 0

    async def hello(self) -> engine_pb2.Hello:
        return (await self._read()).hello

    async def submit(
        self,
        attempt: int,
        prompt=(1, 2, 3),
        max_tokens=6,
        temperature=1.0,
        output=(),
        group_id="",
        time_left_ms=None,
        suspicion=engine_pb2.SUSPICION_UNSPECIFIED,
        **settings,
    ) -> None:
        params = engine_pb2.EngineSamplingParams(
            temperature=temperature, top_p=1.0, seed=attempt, max_tokens=max_tokens, **settings
        )
        submit = engine_pb2.Submit(
            attempt=attempt,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling_params=params,
            priority=2,
            group_id=group_id,
            time_left_ms=time_left_ms,
            suspicion=suspicion,
        )
        await self._call.write(engine_pb2.LinkRequest(submit=submit))

    async def abort(self, attempt: int) -> None:
        await self._call.write(engine_pb2.LinkRequest(abort=engine_pb2.Abort(attempt=attempt)))

    async def follow_cache(self) -> None:
        await self._call.write(engine_pb2.LinkRequest(follow_cache=engine_pb2.FollowCache()))

    async def set_log_level(self, level: str) -> None:
        await self._call.write(engine_pb2.LinkRequest(set_log_level=engine_pb2.SetLogLevel(level=level)))

    async def kill(self) -> None:
        await self._call.write(engine_pb2.LinkRequest(kill=engine_pb2.Kill()))

    async def read_until(self, condition) -> None:
        while not condition():
            message = await self._read()
            if message.HasField("heartbeat"):
                self.heartbeats.append(message.heartbeat)
                continue
            step = message.step
            self.load = step.load
            self.stats = step.stats if step.HasField("stats") else self.stats
            events = step.cache_events
            self.cached = (self.cached | set(events.stored)) - set(events.evicted)
            self.max_cache_events = max(self.max_cache_events, len(events.stored) + len(events.evicted))
            for attempt, token_id in zip(step.plain_attempts, step.plain_token_ids, strict=True):
                self.tokens[attempt].append(token_id)
            for delta in step.deltas:
                self.tokens[delta.attempt].extend(delta.token_ids)
                self.prompt_logprobs[delta.attempt] += [item.logprob for item in delta.prompt_logprobs]
                if delta.finish_reason:
                    self.finished[delta.attempt] = delta.finish_reason
            self.rejected.update({rejection.attempt: rejection for rejection in step.rejections})

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _read(self) -> engine_pb2.LinkResponse:
        return await asyncio.wait_for(self._call.read(), TIMEOUT_S)


def over_a_link(engine: Engine, scenario, **options) -> None:
    """Runs `await scenario(router, server)` against a served engine."""

    async def run() -> None:
        server = await LinkServer.start(
            SimpleNamespace(engine=engine, info=INFO, health=HealthConfig(heartbeat_s=0.01), movers=None),
            replica_id="r0",
            **options,
        )
        router = Router(server.address)
        try:
            hello = await router.hello()
            assert (hello.replica_id, hello.model, hello.num_blocks) == ("r0", "pseudo", NUM_BLOCKS)
            assert hello.answers_digest == INFO.answers_digest
            await scenario(router, server)
        finally:
            await router.close()
            await server.stop()

    loops.run(run())
