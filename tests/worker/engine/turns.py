"""An engine whose turns are counted, under a fixed load and a clock of its own. As a program it prints allocations."""

import json
import sys

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.request import AttemptKey, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.counting import Counted, Ticks, collector_at_rest
from tests.reference.step_sampler import TorchSampler

BLOCK_SIZE = 16
WARM = 74
"""Turns after which what is made once is made, and the tuner fits its model no longer at every other turn."""
INFO = ModelInfo(
    model="free",
    path="",
    model_type="free",
    max_model_len=1000,
    vocab_size=32000,
    eos_token_ids=frozenset({2}),
    dtype="",
    tensor_parallel_size=1,
    block_size=BLOCK_SIZE,
    num_blocks=4096,
    kv_bytes_per_token=0,
    row_invariant=True,
)


class FreeModel(ModelRunner):
    """A rank whose model draws the same token for everyone, at no cost."""

    def __init__(self) -> None:
        self.info, self.draft = INFO, None
        self.progress = ProgressCounter()

    @property
    def sampler(self) -> StepSampler:
        return TorchSampler()

    def execute(self, batch: StepBatch) -> HeadOutput:
        return HeadOutput(None, [7] * len(batch.logits_rows))


class KeepingLeader(LeaderRunner):
    """Keeps what a step is made of, so that it counts as made."""

    def __init__(self) -> None:
        super().__init__(FreeModel(), SingleRank())
        self.kept: list[tuple[StepPlan, StepResult]] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.kept.append((plan, result))
        return result


class KeepingListener:
    def __init__(self) -> None:
        self.updates: list[StepUpdate] = []

    def on_update(self, update: StepUpdate) -> None:
        self.updates.append(update)

    def on_failure(self, error: Exception) -> None:
        raise error


class Turns:
    """An engine on this thread, some of whose requests decode, each at another place in its block."""

    def __init__(self, num_rows: int, **params: object) -> None:
        config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=64 * num_rows)
        scheduler = Scheduler(
            config, num_blocks=4096, block_size=BLOCK_SIZE, max_model_len=1000, eos_token_ids=INFO.eos_token_ids
        )
        self.listener = KeepingListener()
        self._leader = KeepingLeader()
        self._engine = Engine(scheduler, self._leader, tuner=StepTuner(config, block_size=BLOCK_SIZE), clock=Ticks())
        self._engine.attach(self.listener)
        for number in range(num_rows):
            self._engine.submit(request(number, **params), self.listener, AttemptKey("link", number))
        self.run(WARM)

    def run(self, count: int = BLOCK_SIZE) -> None:
        """As many as there are tokens in a block, so that each request fills one."""
        for _ in range(count):
            self._engine._take_commands()
            self._engine._turn()

    def calls(self) -> float:
        """Calls of Python functions in a turn."""
        with Counted() as counts:
            self.run()
        return counts["all of Python"] / BLOCK_SIZE

    def blocks(self) -> float:
        """Pieces of memory that a turn makes and somebody keeps: the plan, its result, updates, and the state after.
        Those of all threads count.
        """
        with collector_at_rest():
            before = sys.getallocatedblocks()
            self.run()
            return (sys.getallocatedblocks() - before) / BLOCK_SIZE


def request(number: int, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(1000 + number, 1020 + number + number % BLOCK_SIZE)),
        sampling_params=SamplingParams(seed=number, max_tokens=900, temperature=0.0, **params),
    )


if __name__ == "__main__":
    print(json.dumps([Turns(1).blocks(), Turns(33).blocks()]))
