"""The router in front of real engines over real links; only the model is a stand-in."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

from holdfast.router.config import RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.v1 import inference_pb2
from holdfast.worker.config import HealthConfig, SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import NO_TOKEN, ScheduledSequence, StepPlan, StepResult
from tests.loops import on_a_loop, on_each_loop
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.router.site import collected, eventually, refusal, request, site
from tests.worker.replica import link_peer

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE = 600, 4, 400, 256
BAD = 13

INFO = replace(
    link_peer.INFO,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    answers_digest=b"",
)


class RealReplica:
    """An engine and its link, without ranks. Made by `start`."""

    @classmethod
    async def start(
        cls, replica_id: str = "r0", *, max_num_waiting: int = 100, runner_class: type = PseudoRunner
    ) -> "RealReplica":
        replica = cls()
        scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16, max_num_waiting=max_num_waiting),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset(),
        )
        replica.engine = Engine(scheduler, runner_class(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE), idle_s=0.05)
        replica.engine.start()
        served = SimpleNamespace(engine=replica.engine, info=INFO, health=HealthConfig(), movers=None)
        replica.server = await LinkServer.start(served, replica_id=replica_id)
        replica.endpoint = ReplicaEndpoint(
            replica_id=replica_id, address=replica.server.address, model="pseudo", model_path="/nowhere"
        )
        return replica

    @property
    def is_idle(self) -> bool:
        """Every block is free."""
        return self.engine.failure is not None or self.engine.stats().num_free_blocks == NUM_BLOCKS

    async def kill(self) -> None:
        await self.server.stop()
        await asyncio.to_thread(self.engine.stop)


@on_a_loop
async def test_64_streams_some_cancelled_are_right_and_leave_no_block_behind():
    async def stream(place, index: int) -> None:
        prompt, num_tokens = [index + 1] * (index % 40 + 1), 10 + 3 * index
        call = place.stub.GenerateStream(request(prompt, max_tokens=num_tokens, seed=index))
        got = []
        async for chunk in call:
            got += chunk.token_ids
            if index % 3 == 0 and len(got) >= 5:
                call.cancel()
                break
        right = pseudo_completion(prompt, index, num_tokens, VOCAB_SIZE)
        assert got == (right[: len(got)] if index % 3 == 0 else right)

    async with site(await RealReplica.start("r0"), await RealReplica.start("r1")) as place:
        await asyncio.gather(*(stream(place, index) for index in range(64)))
        await place.until_idle()


@on_each_loop
async def test_output_ends_where_the_context_does():
    async with site(await RealReplica.start()) as place:
        answer = await place.stub.Generate(request([1] * 390, max_tokens=50))
        assert answer.completions[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert answer.usage.completion_tokens == 10


@on_each_loop
async def test_what_a_full_engine_refuses_is_served_later():
    """16 run, one waits, and the router sends more than that before it hears."""
    async with site(await RealReplica.start(max_num_waiting=1)) as place:
        answers = await asyncio.gather(*(place.stub.Generate(request([1], max_tokens=30)) for _ in range(30)))
        right = pseudo_completion([1], 1, 30, VOCAB_SIZE)
        assert all(list(answer.completions[0].token_ids) == right for answer in answers)


@on_each_loop
async def test_the_streams_of_an_engine_that_ends_go_on_elsewhere():
    ending = await RealReplica.start("ending")
    async with site(ending, await RealReplica.start("going on")) as place:
        calls = [place.stub.GenerateStream(request([1], max_tokens=390, seed=seed)) for seed in range(8)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        await asyncio.to_thread(ending.engine.stop)
        for seed, call in enumerate(calls):
            token_ids = [token_id for chunk in await collected(call) for token_id in chunk.token_ids]
            assert token_ids == pseudo_completion([1], seed, 390, VOCAB_SIZE)


class LosesNumbers(PseudoRunner):
    """Has no token for prompts that begin with `BAD`, and for nobody from the first step of more than `most` on."""

    has_numbers = True
    most = 1000
    may_run: threading.Event | None = None
    """Steps wait for it, so that what is submitted meanwhile runs together."""
    num_held = 0
    """Sequences of the step that waits for `may_run`."""

    def run(self, plan: StepPlan) -> StepResult:
        if self.may_run is not None:
            self.num_held = len(plan.sequences)
            self.may_run.wait()
        self.has_numbers &= len(plan.sequences) <= self.most
        drawn = [
            tuple(token_id if self._knows(sequence) else NO_TOKEN for token_id in token_ids)
            for sequence, token_ids in zip(plan.sequences, super().run(plan).token_ids, strict=True)
        ]
        return StepResult(step_id=plan.step_id, token_ids=tuple(drawn))

    def _knows(self, sequence: ScheduledSequence) -> bool:
        return self.has_numbers and self.read_back(sequence)[0] != BAD


@on_each_loop
async def test_a_request_whose_logits_are_no_numbers_fails_once_and_takes_nobody_along():
    replicas = [await RealReplica.start(name, runner_class=LosesNumbers) for name in ("r0", "r1")]
    async with site(*replicas) as place:
        calls = [place.stub.GenerateStream(request([1], max_tokens=200, seed=seed)) for seed in range(8)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        refused = await refusal(place.stub.Generate(request([BAD, 5])))
        assert (refused.code, refused.reason) == ("INTERNAL", "INTERNAL")
        assert "not finite" in refused.message
        for seed, call in enumerate(calls):
            token_ids = [token_id for chunk in await collected(call) for token_id in chunk.token_ids]
            assert token_ids == pseudo_completion([1], seed, 200, VOCAB_SIZE)
        assert all(replica.engine.failure is None for replica in replicas)
        assert sum(replica.engine.stats().num_requests for replica in replicas) == 9, "it was tried once"


@on_each_loop
async def test_streams_of_a_replica_that_has_no_numbers_for_anybody_go_on_elsewhere():
    bad, good = [await RealReplica.start(name, runner_class=LosesNumbers) for name in ("bad", "good")]
    bad.engine._runner.most = 2  # several streams are under way then: a single one would be blamed itself
    may_run = threading.Event()
    bad.engine._runner.may_run = good.engine._runner.may_run = may_run  # one that ends its streams would get all others

    async def three_run_together() -> bool:
        """The step that is held counts: before it began, the inbox may hold what becomes a step of two."""
        held = bad.engine._runner.num_held
        return held > 0 and held + bad.engine._inbox._commands.qsize() >= 3

    async with site(bad, good) as place:
        calls = [place.stub.GenerateStream(request([1], max_tokens=390, seed=seed)) for seed in range(8)]
        await eventually(three_run_together)
        may_run.set()
        for seed, call in enumerate(calls):
            token_ids = [token_id for chunk in await collected(call) for token_id in chunk.token_ids]
            assert token_ids == pseudo_completion([1], seed, 390, VOCAB_SIZE)
        assert "not finite" in str(bad.engine.failure)


@on_each_loop
async def test_a_shared_prefix_is_computed_once_and_salts_keep_it_apart():
    prefix = list(range(1, 101))

    async def cached(place, tail: int, salt: str) -> int:
        prompt = [*prefix, tail]
        answer = await place.stub.Generate(request(prompt, max_tokens=6, cache_salt=salt))
        assert list(answer.completions[0].token_ids) == pseudo_completion(prompt, 1, 6, VOCAB_SIZE)
        return answer.usage.cached_prompt_tokens

    async with site(await RealReplica.start()) as place:
        assert [await cached(place, tail, "") for tail in (200, 201, 202)] == [0, 100, 100]
        assert [await cached(place, 200, "tenant") for _ in range(2)] == [0, 100]


@on_each_loop
async def test_requests_go_to_where_their_prefix_is_and_statistics_say_so():
    async def cached(place, first: int, tail: int) -> int:
        answer = await place.stub.Generate(request([*range(first, first + 100), tail], max_tokens=2))
        return answer.usage.cached_prompt_tokens

    async with site(await RealReplica.start("r0"), await RealReplica.start("r1")) as place:
        hits = [[await cached(place, first, tail) for first in (1, 101)] for tail in range(200, 210)]
        assert hits == [[0, 0]] + [[100, 100]] * 9

        async def told_all() -> bool:
            load = await place.stub.GetLoad(inference_pb2.GetLoadRequest())
            stats = [replica.stats for replica in load.replicas]
            return (sum(item.num_prefix_hit_tokens for item in stats), sum(item.num_finished for item in stats)) == (
                1800,
                20,
            )

        await eventually(told_all)


@on_each_loop
async def test_a_router_that_does_not_follow_the_cache_is_told_nothing_of_it():
    replica = await RealReplica.start()
    async with site(replica, config=RouterConfig(routing_policy="power_of_two")) as place:
        await place.stub.Generate(request([1] * 50, max_tokens=2))
        assert replica.engine.stats().num_cached_blocks > 0
        assert all(not len(state.cached) for state in place.router._dispatch_host.dispatch.registry)
