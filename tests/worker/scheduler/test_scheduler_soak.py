"""A long run of the scheduler under more load than it can serve: every answer is right, everybody gets theirs.

Requests of all classes, with and without deadlines, cancels, too few blocks, and three tenants who always have requests
waiting, on the pseudo-model. Everything follows from a seed; time is counted in steps.
"""

import random
from collections import Counter

import pytest

from benchmarks.bucketed_batching import BucketedBatching
from benchmarks.static_batching import StaticBatching
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.batching import ContinuousBatching, MakePolicy, MemoryAwareBatching
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.waiting_queue import OUTPUT_WEIGHT
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.schedulers import dropped

SHARES = {"gold": 2.0, "silver": 1.0, "bronze": 0.5}
"""The tenants who always have requests waiting."""
LENGTHS = {"gold": (12, 3), "silver": (2, 12), "bronze": (8, 8)}
"""The most tokens of a prompt and of an output that they send; others up to twelve of each."""

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 16, 4, 500
STEP_S, AGING_S = 0.02, 20.0
STEPS_TO_THE_TOP = round(3 * AGING_S / STEP_S)
"""Steps of waiting after which LOW counts as CRITICAL."""


class Soak:
    def __init__(self, make_policy: MakePolicy, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=6,
                max_num_batched_tokens=16,
                max_num_waiting=64,
                aging_s=AGING_S,
                tenant_shares=SHARES,
            ),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=48,
            eos_token_ids=frozenset(),
            prefix_caching=make_policy in (ContinuousBatching, MemoryAwareBatching),
            make_policy=make_policy,
        )
        self.runner = PseudoRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
        self.num_steps = 0
        self.num_added = 0
        self.expected: dict[str, list[int]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.added_at: dict[str, int] = {}
        self.waiting_of: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.longest_wait = dict.fromkeys(Priority, 0)

    # --- what happens ---

    def add(self, tenant: str, priority: Priority = Priority.NORMAL, time_left_s: float | None = None) -> None:
        rng, seed = self.rng, self.num_added
        max_prompt_len, max_output_len = LENGTHS.get(tenant, (12, 12))
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_prompt_len)))
        request = EngineRequest(
            request_id=f"{tenant}-{seed}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(seed=seed, max_tokens=rng.randint(1, max_output_len)),
            priority=priority,
            tenant=tenant,
            time_left_s=time_left_s,
        )
        try:
            assert self.scheduler.add(request, self.now) is None
        except QueueFullError:
            self.endings["refused"] += 1
            return
        self.num_added += 1
        max_tokens = request.sampling_params.max_tokens
        self.expected[request.request_id] = pseudo_completion(prompt, seed, max_tokens, VOCAB_SIZE)
        self.requests[request.request_id] = request
        self.added_at[request.request_id] = self.num_steps
        self.waiting_of[tenant] += 1

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        for request_id in dropped(self.scheduler):
            self.end(request_id, "expired")
        if plan is not None:
            for delta in self.scheduler.commit(plan, self.runner.run(plan)):
                self.take(delta)
        self.num_steps += 1
        if self.num_steps % 250 == 0:
            self.scheduler.check_integrity()

    def cancel_one(self) -> None:
        strangers = [key for key, request in self.requests.items() if request.tenant not in SHARES]
        if strangers:
            delta = self.scheduler.abort(self.rng.choice(strangers))
            assert delta.finish_reason is FinishReason.ABORT
            self.end(delta.attempt, "aborted")

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check_integrity()
        assert not self.requests, "everyone has had an answer"

    # --- what comes of it ---

    def take(self, delta: TokenDelta) -> None:
        request = self.requests[delta.attempt]
        outputs = self.expected[delta.attempt]
        end = delta.first_token_index + len(delta.token_ids)
        assert list(delta.token_ids) == outputs[delta.first_token_index : end]
        if delta.first_token_index == 0:
            self.waiting_of[request.tenant] -= 1
            self.served[request.tenant] += len(request.prompt_token_ids) - delta.num_cached_tokens
            waited = self.num_steps - self.added_at[delta.attempt]
            self.longest_wait[request.priority] = max(waited, self.longest_wait[request.priority])
        self.served[request.tenant] += OUTPUT_WEIGHT * len(delta.token_ids)
        if delta.finish_reason is not None:
            assert (delta.finish_reason, end) == (FinishReason.LENGTH, len(outputs))
            self.end(delta.attempt, "finished")

    def end(self, request_id: str, how: str) -> None:
        """A request ends once: another end of it finds nothing here."""
        self.endings[how] += 1
        for book in (self.requests, self.expected, self.added_at):
            del book[request_id]

    @property
    def now(self) -> float:
        return self.num_steps * STEP_S

    def unfairness(self) -> float:
        """How much more than another one tenant got for its share, of those who always wait: 1 is fair."""
        got = [self.served[tenant] / share for tenant, share in SHARES.items()]
        return max(got) / min(got)


def play(make_policy: MakePolicy, seed: int, num_steps: int) -> Soak:
    """All that can happen, at random; the three tenants always have at least three requests waiting."""
    soak = Soak(make_policy, seed)
    rng = soak.rng
    for _ in range(num_steps):
        for tenant in SHARES:
            while soak.waiting_of[tenant] < 3:
                soak.add(tenant)
        if rng.random() < 0.15:
            time_left_s = rng.choice([None, None, 0.1, 1.0, 30.0])
            soak.add(rng.choice(["", "stranger"]), rng.choice(list(Priority)), time_left_s)
        if rng.random() < 0.02:
            soak.cancel_one()
        soak.step()
    soak.drain()
    assert min(soak.endings[how] for how in ("finished", "aborted", "expired")) > num_steps / 1000
    return soak


def check_continuous(num_steps: int) -> None:
    soak = play(ContinuousBatching, seed=1, num_steps=num_steps)
    assert soak.scheduler.stats().num_preemptions > num_steps / 100, "memory was short"
    assert soak.unfairness() < 1.1
    assert max(soak.longest_wait.values()) < STEPS_TO_THE_TOP + 500


def test_steps_are_right_and_fair_and_nobody_starves():
    check_continuous(2_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_thousand_steps_are_right_and_fair_and_nobody_starves():
    check_continuous(200_000)


@pytest.mark.slow
@pytest.mark.parametrize("make_policy", [MemoryAwareBatching, StaticBatching, BucketedBatching])
def test_the_other_policies_are_right_and_answer_everyone(make_policy):
    soak = play(make_policy, seed=2, num_steps=2_500)
    if make_policy is MemoryAwareBatching:
        assert soak.unfairness() < 1.1


def test_low_waits_no_longer_than_aging_says_under_a_flood_of_critical_ones():
    soak = Soak(ContinuousBatching, seed=3)
    for _ in range(3 * STEPS_TO_THE_TOP):
        while soak.waiting_of["flood"] < 12:
            soak.add("flood", Priority.CRITICAL, soak.rng.choice([None, 60.0]))
        if soak.num_steps % 500 == 0:
            soak.add("flood", Priority.LOW)
            soak.add("other", Priority.LOW)
        soak.step()
    assert STEPS_TO_THE_TOP <= soak.longest_wait[Priority.LOW] < STEPS_TO_THE_TOP + 200
    soak.drain()
