"""An engine over a device that runs a step while the next is planned, on this thread and in virtual time: for tests."""

import random
from collections import defaultdict
from dataclasses import replace

from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID
from holdfast.cluster.simulate.oracle.pseudo_runner import PseudoRunner as RichRunner
from holdfast.cluster.simulate.world.traffic import draw_requests
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineRequest, FinishReason, PoisonRisk, Priority, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.fake_device import FakeDevice, VirtualClock

BLOCK_SIZE, VOCAB_SIZE = 4, 1000


class Listener:
    """Remembers what it is told, which takes the host `host_s` each time."""

    def __init__(self, clock: VirtualClock, host_s: float = 0.0) -> None:
        self.deltas: dict[object, list[TokenDelta]] = defaultdict(list)
        self.ended: dict[object, FinishReason | HoldfastError] = {}
        self.failure: HoldfastError | None = None
        self._clock, self._host_s = clock, host_s

    def on_update(self, update: StepUpdate) -> None:
        self._clock.now += self._host_s
        for delta in update.deltas:
            assert delta.attempt not in self.ended, "nothing comes after the end"
            if self.deltas[delta.attempt]:
                assert delta.first_token_index == len(self.tokens(delta.attempt)), "no token twice, and none left out"
            self.deltas[delta.attempt].append(delta)
            if delta.finish_reason is not None:
                self.ended[delta.attempt] = delta.finish_reason
        for rejection in update.rejections:
            assert rejection.attempt not in self.ended
            self.ended[rejection.attempt] = rejection.error

    def on_failure(self, error: HoldfastError) -> None:
        self.failure = error

    def tokens(self, attempt: object) -> list[int]:
        return [token_id for delta in self.deltas[attempt] for token_id in delta.token_ids]

    def output_of(self, attempt: object) -> tuple[object, ...]:
        """All that a request was told, but for the steps in which it came."""
        deltas = self.deltas[attempt]
        return (
            self.tokens(attempt),
            [one for delta in deltas for one in delta.logprobs],
            [one for delta in deltas for one in delta.prompt_logprobs],
            str(self.ended.get(attempt)),
        )


class Turns:
    """An engine on this thread, in virtual time."""

    def __init__(
        self, model=None, *, two_plans=True, num_blocks=64, host_s=0.0, eos=(), caching=True, **config
    ) -> None:
        self.clock = VirtualClock()
        model = model or PseudoRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        options = {name: config.pop(name) for name in ("step_s", "may_follow") if name in config}
        self.device = FakeDevice(model, BLOCK_SIZE, self.clock, **options)
        if not two_plans:
            self.device._may_follow = lambda plan: False
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_num_batched_tokens": 16, "max_num_seqs": 8, **config}),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=200,
            eos_token_ids=frozenset(eos),
            prefix_caching=caching,
        )
        self.engine = Engine(self.scheduler, self.device, clock=self.clock, idle_s=0.0)
        self.listener = Listener(self.clock, host_s)
        self.engine.attach(self.listener)
        self.turn()

    def submit(self, request_id: str, **wishes) -> None:
        self.engine.submit(make_request(request_id, **wishes), self.listener)

    def turn(self) -> None:
        self.engine._take_commands()
        self.engine._turn()
        self.engine._core.check_integrity()

    def run(self, num_turns=5000) -> None:
        for _ in range(num_turns):
            if not self.engine.has_work:
                break
            self.turn()

    def check_end(self) -> None:
        assert not self.engine.has_work
        stats = self.engine._core.scheduler.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def make_request(
    request_id, prompt=(1, 2, 3), max_tokens=8, seed=7, time_left_s=None, priority=Priority.NORMAL, **more
):
    poison_risk = more.pop("poison_risk", PoisonRisk.NONE)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed, **more),
        time_left_s=time_left_s,
        priority=priority,
        poison_risk=poison_risk,
    )


def completion(num_tokens, prompt=(1, 2, 3), seed=7, stop=()):
    return pseudo_completion(prompt, seed, num_tokens, VOCAB_SIZE, stop)


# --- all kinds of requests ---


def mixed_load(seed: int) -> list[tuple[float, EngineRequest]]:
    """Arrivals of requests of every kind, some of several completions."""
    rng, arrivals = random.Random(seed), []
    for planned in draw_requests(rng, 25, 30.0, 100):
        request = planned.request
        if planned.is_poison:
            continue
        for index in range(request.sampling_params.n):
            params = request.sampling_params.with_changes(n=1, seed=request.sampling_params.seed + index)
            one = replace(request, request_id=f"{request.request_id}.{index}", sampling_params=params)
            arrivals.append((planned.arrival_s, replace(one, group_id=request.request_id) if index else one))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def serve(seed: int, *, two_plans: bool) -> Turns:
    rng = random.Random(seed)
    num_blocks = rng.choice((26, 40, 400))
    config = {"max_num_seqs": rng.choice((3, 12, 32)), "max_num_batched_tokens": rng.choice((5, 64))}
    model, caching = RichRunner(num_blocks, BLOCK_SIZE), rng.random() < 0.7
    can_follow = rng.choice((1.0, 0.7))
    turns = Turns(
        model,
        two_plans=two_plans,
        num_blocks=num_blocks,
        eos=(EOS_TOKEN_ID,),
        caching=caching,
        step_s=lambda plan: 0.2 + 0.01 * plan.num_tokens,
        may_follow=lambda plan: hash((seed, plan.step_id)) % 10 < 10 * can_follow,
        **config,
    )
    arrivals = mixed_load(seed)
    while arrivals or turns.engine.has_work:
        if not turns.engine.has_work:
            turns.clock.now = max(turns.clock.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= turns.clock.now:
            turns.engine.submit(arrivals.pop(0)[1], turns.listener)
        turns.turn()
    turns.check_end()
    return turns
