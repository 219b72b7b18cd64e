"""Two steps on the device at a time: what one draws is put into the next one there, and read by the host later."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.worker.executors.gpu.interpreter import launch  # isort: skip  # first: it skips where there is no Triton
from holdfast.worker.config import SchedulerConfig, WorkerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.engine.steps_in_flight import DeviceRunner
from holdfast.worker.executors.gpu.draw_launches import DrawnTokens
from holdfast.worker.models.loading import LoadedModel
from holdfast.worker.models.native_backend import NativeBackend
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import NO_TOKEN, StepPlan
from tests.worker.engine.turns import INFO
from tests.worker.engine.two_plans import Listener, make_request
from tests.worker.executors.cpu.runs import layout_of, tokens
from tests.worker.executors.gpu import runs
from tests.worker.executors.gpu.test_executor import FakeDevice
from tests.worker.executors.steps import Part, batch_of
from tests.worker.fake_device import VirtualClock

Runner = partial(runs.Runner, launch=launch)


@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_tokens_are_put_in_where_they_are_pending_and_nowhere_else(num_rows):
    drawn = torch.randint(0, 5000, (400,), dtype=torch.int32)
    drawn[7] = NO_TOKEN
    ids = torch.randint(0, 5000, (num_rows + 5,), dtype=torch.int32)
    rows = torch.randperm(400)[:num_rows]
    rows[0] = 7
    is_pending = torch.rand(num_rows) < 0.5
    is_pending[0] = True
    given = ids.clone()
    given[:num_rows] = torch.where(is_pending, -1 - rows, ids[:num_rows])
    after = given.clone()
    store = DrawnTokens(launch)
    store.last = drawn
    store.put_in(after[:num_rows])
    expected = torch.where(is_pending, drawn[rows].clamp(min=0), ids[:num_rows])
    assert torch.equal(after[:num_rows], expected.int())
    assert torch.equal(after[num_rows:], given[num_rows:]), "rows beyond the step"


def chain(runner: runs.Runner, prompts, num_tokens: int, *, ahead: bool) -> list[list[int]]:
    """The best tokens after these prompts, step by step; with `ahead`, each step is launched before the one before it
    is collected. The last sequence changes its place among the rows at every step.
    """
    executor = runner.executor
    tables = [runner.blocks(len(prompt) + num_tokens) for prompt in prompts]
    order, before = list(range(len(prompts))), []
    parts = {number: Part(0, prompt, tables[number]) for number, prompt in enumerate(prompts)}
    found, in_flight = {number: [] for number in order}, []

    def collect() -> None:
        numbers, launched = in_flight.pop(0)
        for number, token in zip(numbers, executor.collect(launched).best, strict=True):
            found[number].append(token)

    for step in range(num_tokens):
        batch = batch_of([parts[number] for number in order], runner.block_size)
        ends = np.cumsum(batch.num_tokens)
        batch = replace(batch, num_draws=np.ones(len(order), dtype=np.int64), logits_rows=ends - 1)
        in_flight.append((list(order), executor.launch(batch, with_logits=False)))
        if not ahead or len(in_flight) == 2:
            collect()
        before, order = order, order[-1:] + order[:-1]
        for number, prompt in enumerate(prompts):
            token = -1 - before.index(number) if ahead else found[number][-1]
            parts[number] = Part(len(prompt) + step, [token], tables[number])
    while in_flight:
        collect()
    return [found[number] for number in range(len(prompts))]


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_that_are_launched_ahead_draw_what_steps_in_turn_do(graphs):
    layout = layout_of("llama")
    prompts = [tokens(count, seed) for seed, count in enumerate((4, 7, 2))]
    in_turn = chain(Runner(layout), prompts, 8, ahead=False)
    assert chain(Runner(layout, capture=FakeDevice() if graphs else None), prompts, 8, ahead=True) == in_turn


class CountedRunner(DeviceRunner):
    """Counts steps that were launched before the one before them was collected."""

    num_ahead = num_sampled = 0
    """The second: after a step that is drawn from logits."""

    def launch(self, plan: StepPlan) -> None:
        self.num_ahead += bool(self._in_flight)
        self.num_sampled += any(step.plan.needs_logits for step in self._in_flight)
        super().launch(plan)


def model_of(runner: runs.Runner) -> ModelRunner:
    """A rank's model, loaded."""
    info = replace(INFO, block_size=16, num_blocks=32)
    loaded = LoadedModel(backend=NativeBackend(runner.executor), cache=runner.cache, info=info, draft=None, pooler=None)
    return ModelRunner(loaded, WorkerConfig(), runner.group, torch.device("cpu"))


def served(runner: runs.Runner, *, ahead: bool) -> tuple[dict[object, tuple[object, ...]], int, int]:
    """What requests are told by an engine over the executor: greedy ones, and from the middle on others too."""
    leader = LeaderRunner(model_of(runner), runner.group)
    stepping = CountedRunner(leader) if ahead else leader
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
        num_blocks=32,
        block_size=16,
        max_model_len=100,
        eos_token_ids=frozenset(),
    )
    engine, listener = Engine(scheduler, stepping, idle_s=0.0), Listener(VirtualClock())
    engine.attach(listener)
    for number, wishes in enumerate(({}, {"stop_token_ids": tuple(range(60, 126))}, {"prompt": tokens(20)})):
        request = make_request(f"r{number}", **{"prompt": tokens(3 + number, number), "temperature": 0.0, **wishes})
        engine.submit(request, listener)
    for turn in range(60):
        if turn == 4:
            for number, wishes in enumerate(
                ({"logprobs": 1}, {"top_p": 0.9}, {"presence_penalty": 0.5, "max_tokens": 2})
            ):
                engine.submit(
                    make_request(f"warm{number}", **{"temperature": 0.9, "max_tokens": 5, **wishes}), listener
                )
        if turn > 4 and not engine.has_work:
            break
        engine._take_commands()
        engine._turn()
    assert not engine.has_work
    assert scheduler.stats().num_used_blocks == 0
    leader.close()
    heard = {attempt: listener.output_of(attempt) for attempt in listener.ended}
    return (heard, stepping.num_ahead, stepping.num_sampled) if isinstance(stepping, CountedRunner) else (heard, 0, 0)


@pytest.mark.slow
def test_an_engine_with_two_steps_on_the_device_tells_what_one_with_steps_in_turn_does():

    def runner() -> runs.Runner:
        return Runner(layout_of("llama"), num_blocks=32, block_size=16, capture=FakeDevice())

    in_turn, *_ = served(runner(), ahead=False)
    assert len(in_turn) == 6
    two_plans, num_ahead, num_sampled = served(runner(), ahead=True)
    assert two_plans == in_turn
    assert num_ahead > num_sampled >= 3
