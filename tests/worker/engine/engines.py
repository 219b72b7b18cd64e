"""An engine over a pseudo-model on a thread of its own, a listener that waits, and a runner that holds: for tests."""

import threading
from collections import defaultdict

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, PoisonRisk
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner

BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S = 4, 64, 20


class Recorder:
    """A listener that remembers, and lets tests wait for a last word."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, FinishReason] = {}
        self.rejected: dict[str, HoldfastError] = {}
        self.failure: HoldfastError | None = None
        self.num_updates = 0
        self.load: EngineLoad | None = None
        self._news = threading.Condition()

    def on_update(self, update: StepUpdate) -> None:
        with self._news:
            self.num_updates += 1
            self.load = update.load
            for delta in update.deltas:
                assert delta.first_token_index == len(self.tokens[delta.attempt])
                assert delta.attempt not in self.finished
                self.tokens[delta.attempt].extend(delta.token_ids)
                if delta.finish_reason:
                    self.finished[delta.attempt] = delta.finish_reason
            self.rejected.update({rejection.attempt: rejection.error for rejection in update.rejections})
            self._news.notify_all()

    def on_failure(self, error: HoldfastError) -> None:
        with self._news:
            self.failure = error
            self._news.notify_all()

    def wait_for(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(condition, TIMEOUT_S), "nothing came in time"


class Gate(PseudoRunner):
    """A runner that holds each step until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.release()
        assert self.go_on.acquire(timeout=TIMEOUT_S)
        return super().run(plan)


def make_engine(
    runner: PseudoRunner | None = None, *, is_started: bool = True, **options
) -> tuple[Engine, PseudoRunner, Recorder]:
    runner = runner or PseudoRunner(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=200,
        eos_token_ids=frozenset(),
    )
    engine, recorder = Engine(scheduler, runner, idle_s=0.05, **options), Recorder()
    engine.attach(recorder)
    if is_started:
        engine.start()
    return engine, runner, recorder


def make_request(
    request_id: str, prompt=(1, 2, 3), max_tokens=8, seed=7, output=(), time_left_s=None, poison_risk=PoisonRisk.NONE
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed),
        output_token_ids=tuple(output),
        time_left_s=time_left_s,
        poison_risk=poison_risk,
    )
