"""The replica's end of the link, over real gRPC on loopback, with a pseudo-model behind it."""

import asyncio
import logging
import threading
from collections import defaultdict
from types import SimpleNamespace

import grpc
import pytest

from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.block_hash import HashChain
from holdfast.worker.config import HealthConfig, SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.log_level import PACKAGE
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.link import LinkServer
from holdfast.worker.scheduling.scheduler import Scheduler
from tests import loops
from tests.pseudo_model import PseudoRunner, pseudo_completion, pseudo_prompt_logprobs

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


@pytest.fixture
def engine():
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=INFO.max_model_len,
        eos_token_ids=INFO.eos_token_ids,
    )
    engine = Engine(scheduler, PseudoRunner(NUM_BLOCKS, BLOCK_SIZE), idle_s=0.05)
    engine.start()
    yield engine
    engine.stop()


def over_a_link(engine: Engine, scenario, **options) -> None:
    """Runs `await scenario(router, server)` against a served engine."""

    async def run() -> None:
        server = await LinkServer.start(
            SimpleNamespace(engine=engine, info=INFO, health=HealthConfig(heartbeat_s=0.01)), replica_id="r0", **options
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


def test_many_attempts_share_one_stream(engine):
    async def scenario(router, server):
        for attempt in range(1, 21):
            await router.submit(attempt)
        await router.read_until(lambda: len(router.finished) == 20)
        for attempt in range(1, 21):
            assert router.tokens[attempt] == pseudo_completion((1, 2, 3), attempt, 6, 1000)
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_a_continued_attempt_starts_where_the_last_one_ended(engine):
    async def scenario(router, server):
        whole = pseudo_completion((1, 2, 3), 5, 6, 1000)
        await router.submit(5, output=whole[:4])
        await router.read_until(lambda: 5 in router.finished)
        assert router.tokens[5] == whole[4:]

    over_a_link(engine, scenario)


def test_attempts_of_a_group_share_their_prompt_and_those_of_another_router_do_not(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        prompt = range(1, 15)
        gate = threading.Event()
        engine._inbox.put(gate.wait)
        for attempt in (1, 2, 3):
            await router.submit(attempt, prompt=prompt, max_tokens=50, group_id="g")
        while engine._inbox._commands.qsize() < 3:
            await asyncio.sleep(0.001)
        gate.set()
        await router.read_until(lambda: len(router.finished) == 3)
        num_forked = (await asyncio.to_thread(engine.stats)).num_forked_tokens
        assert num_forked == 2 * 13
        for attempt in (1, 2, 3):
            assert router.tokens[attempt] == pseudo_completion(prompt, attempt, 50, 1000)
        await router.submit(4, prompt=prompt, max_tokens=0, group_id="h")
        await router.read_until(lambda: router.tokens[4])
        await other.submit(1, prompt=prompt, max_tokens=4, group_id="h")
        await other.read_until(lambda: 1 in other.finished)
        assert (await asyncio.to_thread(engine.stats)).num_forked_tokens == num_forked
        await other.close()

    over_a_link(engine, scenario)


def test_a_suspect_of_one_router_is_told_to_the_other_alone(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        await router.submit(1, max_tokens=50, suspicion=engine_pb2.SUSPICION_SUSPECT)
        await other.read_until(lambda: other.load and other.load.num_foreign_suspects == 1)
        await other.read_until(lambda: other.load.num_foreign_suspects == 0)
        await router.read_until(lambda: router.tokens[1])
        assert router.load.num_foreign_suspects == 0
        await other.close()

    over_a_link(engine, scenario)


def test_logprobs_of_a_prompt_come_once_without_the_first_token(engine):
    async def scenario(router, server):
        prompt = range(1, 40)
        await router.submit(1, prompt=prompt, prompt_logprobs=0)
        await router.submit(2, prompt=prompt)
        await router.submit(3, prompt=prompt, prompt_logprobs=21)
        await router.read_until(lambda: len(router.finished) == 2 and router.rejected)
        expected = pseudo_prompt_logprobs(prompt, 1000)
        assert router.prompt_logprobs[1] == [item.logprob for item in expected]
        assert router.prompt_logprobs[2] == []
        assert router.rejected[3].field == "sampling_params.prompt_logprobs"

    over_a_link(engine, scenario)


def test_an_abort_frees_the_attempts_blocks(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await router.abort(1)
        await router.read_until(lambda: 1 in router.finished)
        assert router.finished[1] == 3
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_bad_attempts_are_rejected_by_field_and_the_link_goes_on(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=())
        await router.submit(2, temperature=float("nan"))
        await router.submit(3, prompt=range(30_000))
        await router.submit(4)
        await router.read_until(lambda: len(router.rejected) == 3 and 4 in router.finished)
        fields = {attempt: rejection.field for attempt, rejection in router.rejected.items()}
        assert fields == {1: "prompt", 2: "sampling_params.temperature", 3: "prompt"}

    over_a_link(engine, scenario)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xff\xff\xff", "the router has sent bytes that are no message"),
        (b"", "the router has sent a message of a kind that is not known here"),
    ],
)
def test_a_router_that_cannot_be_understood_is_told_so_and_the_others_go_on(engine, data, told):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream("/holdfast.v1.Engine/Link")()
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(drained(call), TIMEOUT_S)
            assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, told)
        num_before = len(router.tokens[1])
        await router.read_until(lambda: len(router.tokens[1]) > num_before)

    over_a_link(engine, scenario)


async def drained(call) -> None:
    async for _ in call:
        pass


def test_numbers_that_no_engine_must_get_are_refused_by_field(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[INFO.vocab_size])
        await router.submit(2, suspicion=9)
        await router.submit(3)
        await router.read_until(lambda: len(router.rejected) == 2 and 3 in router.finished)
        assert {key: item.field for key, item in router.rejected.items()} == {1: "prompt", 2: "suspicion"}
        assert "below the vocabulary's size, 1000" in router.rejected[1].message

    over_a_link(engine, scenario)


def test_an_attempt_that_comes_twice_is_refused_and_the_first_goes_on(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await router.submit(1)
        await router.read_until(lambda: 1 in router.rejected)
        num_before = len(router.tokens[1])
        await router.read_until(lambda: len(router.tokens[1]) > num_before)
        assert router.rejected[1].field == "request_id"

    over_a_link(engine, scenario)


def test_an_attempt_whose_time_is_up_is_rejected_as_late(engine):
    async def scenario(router, server):
        await router.submit(1, time_left_ms=0)
        await router.submit(2, time_left_ms=60_000)
        await router.read_until(lambda: 1 in router.rejected and 2 in router.finished)
        assert router.rejected[1].deadline_exceeded
        assert router.rejected[1].retry_after_ms == 0

    over_a_link(engine, scenario)


def test_a_router_that_goes_away_takes_its_requests_with_it(engine):
    async def scenario(router, server):
        other = Router(server.address)
        await other.hello()
        await other.submit(1, max_tokens=0)
        await other.read_until(lambda: other.tokens[1])
        await other.close()
        await router.submit(1, max_tokens=2)
        await router.read_until(lambda: 1 in router.finished and router.load.num_running == 0)
        assert router.load.num_free_blocks == NUM_BLOCKS

    over_a_link(engine, scenario)


def test_the_end_of_the_engine_ends_the_stream_with_unavailable(engine):
    async def scenario(router, server):
        await router.submit(1, max_tokens=0)
        await router.read_until(lambda: router.tokens[1])
        await asyncio.to_thread(engine.stop)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await router.read_until(lambda: False)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE

    over_a_link(engine, scenario)


def test_a_busy_replica_beats_although_its_engine_is_stuck(engine, monkeypatch):
    """The heart is on the event loop: an engine held up in a step stops the counter and not the beat."""
    let_go = threading.Event()
    run = engine._runner.run

    def stuck(plan):
        assert let_go.wait(TIMEOUT_S)
        return run(plan)

    monkeypatch.setattr(engine._runner, "run", stuck)

    async def scenario(router, server):
        await router.submit(1)
        try:
            await router.read_until(lambda: len(router.heartbeats) >= 5)
            assert len({heartbeat.progress for heartbeat in router.heartbeats[1:]}) == 1
        finally:
            let_go.set()
        await router.read_until(lambda: 1 in router.finished)

    over_a_link(engine, scenario)


def test_a_router_that_asks_hears_what_is_cached_in_messages_of_bounded_size(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[1] * 19_000, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)
        assert not router.cached, "it has not asked"
        await router.follow_cache()
        await router.read_until(lambda: len(router.cached) == 19_000 // BLOCK_SIZE)
        assert router.max_cache_events == 4096
        chain = HashChain("")
        last = chain.hash_of(4000, [1] * 19_000, BLOCK_SIZE)
        assert int.from_bytes(last[:8], "little") in router.cached

    over_a_link(engine, scenario)


def test_a_replica_is_killed_by_a_router_only_if_it_was_started_for_that(engine):
    killed = []

    async def scenario(router, server):
        await router.kill()
        await router.submit(1, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)

    over_a_link(engine, scenario)
    assert not killed
    over_a_link(engine, scenario, on_kill=lambda: killed.append(True))
    assert killed == [True]


def test_a_router_that_passes_on_an_operators_order_changes_what_is_logged(engine):
    async def scenario(router, server):
        await router.set_log_level("DEBUG")
        await router.submit(1, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)
        assert logger.level == logging.DEBUG
        await router.set_log_level("loud")
        with pytest.raises(grpc.aio.AioRpcError, match="log_level"):
            await router.read_until(lambda: False)
        assert logger.level == logging.DEBUG

    logger = logging.getLogger(PACKAGE)
    level = logger.level
    try:
        over_a_link(engine, scenario)
    finally:
        logger.setLevel(level)


def test_statistics_come_up_the_link(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[1] * 9, max_tokens=3)
        await router.read_until(lambda: router.stats is not None and router.stats.num_finished == 1)
        stats = router.stats
        assert (stats.num_requests, stats.num_tokens_generated, stats.num_prefix_query_tokens) == (1, 3, 9)
        assert (stats.num_cached_blocks, stats.num_used_blocks, stats.num_free_blocks) == (2, 0, NUM_BLOCKS)
        assert stats.step_time_s > 0

    over_a_link(engine, scenario)
