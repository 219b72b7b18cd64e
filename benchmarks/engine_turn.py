"""Times of an engine's own turn: everything from one step to the next but the model's forward.

    python -m benchmarks.engine_turn [--rows 1,8,32,128,512] [--rounds 7] [--turns 160] [--cpu] [--json FILE]

An engine on its own thread, with scheduler, tuner, leader and a listener, decodes so many greedy requests with contexts
of about 200 tokens, in blocks of 16. The model is free: it returns fixed tokens. Rounds of the batch sizes alternate,
and each measures turns once all requests decode; the table has medians and the fastest tenth. A turn is the time from
one call of the runner to the next, less what the free model takes:

    plan     what the next step does
    pack     the plan as arrays, over a group of one rank, and back; and what was drawn, sequence by sequence
    commit   the tokens into the sequences, and deltas out
    deliver  the deltas to their listener
    rest     commands, progress, the tuner

On a machine with other work, `--cpu` leaves out the time in which the engine's thread had no core. Asking for it takes
about 5 us of a turn.
"""

import argparse
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.errors import HoldfastError
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.request import AttemptKey, EngineRequest, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate

NUM_PROMPT_TOKENS: Final = 112
BLOCK_SIZE: Final = 16
NUM_WARM_TURNS: Final = 20
SPARE_TOKENS: Final = 40
"""Generated beside those of the turns: before all decode, and by a turn or two after the last that is measured."""
TOKEN_ID: Final = 7
PARTS: Final = ("plan", "pack", "commit", "deliver", "rest", "turn")


@dataclass(slots=True)
class Turns:
    """Seconds of the turns of one batch size, part by part."""

    num_rows: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def add(self, marks: "Marks", next_run: float) -> None:
        parts = {
            "plan": marks.planned - marks.plan,
            "pack": marks.execute - marks.run + marks.ran - marks.executed,
            "commit": marks.committed - marks.commit,
            "deliver": marks.delivered - marks.committed,
            "turn": next_run - marks.run - (marks.executed - marks.execute),
        }
        parts["rest"] = parts["turn"] - sum(parts[part] for part in ("plan", "pack", "commit", "deliver"))
        for part, taken_s in parts.items():
            self.seconds[part].append(taken_s)


@dataclass(slots=True)
class Marks:
    """When the stations of the turn now running were passed. Written by the engine's thread alone."""

    now: Callable[[], float]
    plan: float = 0.0
    planned: float = 0.0
    run: float = 0.0
    execute: float = 0.0
    executed: float = 0.0
    ran: float = 0.0
    commit: float = 0.0
    committed: float = 0.0
    delivered: float = 0.0


class MarkedScheduler(Scheduler):
    """A scheduler that marks its two calls of a turn."""

    marks: Marks

    def plan(self, now: float = 0.0, max_steps: int = 1) -> StepPlan | None:
        started = self.marks.now()
        plan = super().plan(now, max_steps)
        self.marks.plan, self.marks.planned = started, self.marks.now()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        self.marks.commit = self.marks.now()
        deltas = super().commit(plan, result)
        self.marks.committed = self.marks.now()
        return deltas


class FreeModel(ModelRunner):
    """A rank whose model costs nothing."""

    def __init__(self, info: ModelInfo, marks: Marks) -> None:
        self.info, self.draft, self._marks = info, None, marks
        self.progress = ProgressCounter()
        self._sampler = NativeSampler.with_threads(1)

    @property
    def sampler(self) -> StepSampler:
        return self._sampler

    def execute(self, batch: StepBatch) -> HeadOutput:
        self._marks.execute = self._marks.now()
        output = HeadOutput(None, [TOKEN_ID] * len(batch.logits_rows))
        self._marks.executed = self._marks.now()
        return output


class MarkedLeader(LeaderRunner):
    """A leader that marks its calls, and writes down the turns in which all requests decode."""

    def __init__(self, model: FreeModel, marks: Marks, turns: Turns, num_turns: int) -> None:
        super().__init__(model, SingleRank())
        self._marks, self._turns = marks, turns
        self._num_decoded = 0
        self._num_turns = num_turns
        self.done = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        started = self._marks.now()
        if NUM_WARM_TURNS < self._num_decoded <= NUM_WARM_TURNS + self._num_turns:
            self._turns.add(self._marks, started)
        self._num_decoded += plan.num_tokens == len(plan.sequences) == self._turns.num_rows
        if self._num_decoded == NUM_WARM_TURNS + self._num_turns + 1:
            self.done.set()
        self._marks.run = self._marks.now()
        result = super().run(plan)
        self._marks.ran = self._marks.now()
        return result


class MarkedListener:
    """A listener that lets go of its updates."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def on_update(self, update: StepUpdate) -> None:
        self._marks.delivered = self._marks.now()

    def on_failure(self, error: HoldfastError) -> None:
        pass


def measure(turns: Turns, num_turns: int, now: Callable[[], float] = time.perf_counter) -> None:
    """One engine, from its start to its end, with so many measured turns."""
    num_tokens = NUM_PROMPT_TOKENS + NUM_WARM_TURNS + num_turns + SPARE_TOKENS
    info = model_info(num_blocks=turns.num_rows * -(-num_tokens // BLOCK_SIZE))
    config = SchedulerConfig(max_num_seqs=turns.num_rows, max_num_batched_tokens=512 + 16 * turns.num_rows)
    scheduler = MarkedScheduler(
        config,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    scheduler.marks = marks = Marks(now)
    leader = MarkedLeader(FreeModel(info, marks), marks, turns, num_turns)
    engine = Engine(scheduler, leader, tuner=StepTuner(config, block_size=info.block_size))
    listener = MarkedListener(marks)
    engine.start()
    engine.attach(listener)
    for number in range(turns.num_rows):
        engine.submit(a_request(number, num_tokens - NUM_PROMPT_TOKENS), listener, AttemptKey("link", number))
    leader.done.wait()
    engine.stop()


def a_request(number: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(1000 + number, 1000 + number + NUM_PROMPT_TOKENS + number % BLOCK_SIZE)),
        sampling_params=SamplingParams(seed=number, temperature=0.0, max_tokens=max_tokens),
    )


def model_info(num_blocks: int) -> ModelInfo:
    return ModelInfo(
        model="free",
        path="",
        model_type="free",
        max_model_len=4096,
        vocab_size=32000,
        eos_token_ids=frozenset({2}),
        dtype="",
        tensor_parallel_size=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_bytes_per_token=0,
        row_invariant=True,
    )


def show(measured: list[Turns], console: Console) -> None:
    table = Table("rows", *PARTS, "fastest tenth", "a row", title="microseconds")
    for turns in measured:
        medians = [statistics.median(turns.seconds[part]) * 1e6 for part in PARTS]
        whole = sorted(turns.seconds["turn"])
        fastest = whole[len(whole) // 10] * 1e6
        cells = [f"{value:.0f}" for value in (*medians, fastest)]
        table.add_row(str(turns.num_rows), *cells, f"{medians[-1] / turns.num_rows:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default="1,8,32,128,512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=160)
    parser.add_argument("--cpu", action="store_true", help="seconds of the engine's thread on a core, not of the clock")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = [Turns(num_rows) for num_rows in arguments.rows]
    for _ in range(arguments.rounds):
        for turns in measured:
            measure(turns, arguments.turns, time.thread_time if arguments.cpu else time.perf_counter)
    console = Console()
    console.print(
        f"medians of {arguments.rounds} x {arguments.turns} turns, {platform.processor() or platform.machine()}"
    )
    show(measured, console)
    if arguments.json:
        arguments.json.write_text(json.dumps({turns.num_rows: turns.seconds for turns in measured}, indent=1))


if __name__ == "__main__":
    main()
