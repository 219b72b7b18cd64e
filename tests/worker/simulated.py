"""A machine for the tests of self-tuning: the real scheduler and tuner, steps that take as long as a formula says."""

import random

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.batching_optimizer import Recommendation
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_time import StepCosts, shape_of
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepResult

MACHINE = StepCosts(base_s=4e-3, decode_s=1e-3, token_s=1.5e-4, context_token_s=5e-8)
BLOCK_SIZE = 16


class SimulatedMachine:
    """Steps with noise, and now and then a pause. With `known`, the tuner knows the costs from the start."""

    def __init__(self, seed=0, *, noise=0.0, pauses=0.0, costs=MACHINE, known=False, **config) -> None:
        settings = SchedulerConfig(**{"max_num_seqs": 64, "max_num_batched_tokens": 512, **config})
        self.scheduler = Scheduler(
            settings,
            num_blocks=4000,
            block_size=BLOCK_SIZE,
            max_model_len=4096,
            eos_token_ids=frozenset(),
            prefix_caching=False,
        )
        self.tuner = StepTuner(settings, block_size=BLOCK_SIZE, costs=costs if known else None)
        self.costs = costs
        self.step_s: list[float] = []
        """Of those steps that had decodes."""
        self.changes: list[tuple[int, Recommendation]] = []
        """What was newly recommended, and after how many steps."""
        self.num_steps = 0
        self.num_finished = 0
        self._rng = random.Random(seed)
        self._noise, self._pauses = noise, pauses
        self._num_requests = 0

    def add(self, prompt_len: int, max_tokens: int) -> None:
        self._num_requests += 1
        self.scheduler.add(
            EngineRequest(
                request_id=f"r{self._num_requests}",
                prompt_token_ids=(1,) * prompt_len,
                sampling_params=SamplingParams(seed=1, max_tokens=max_tokens),
            )
        )

    def run(self, num_steps: int, *, rate: float, prompt_len: int, max_tokens: int) -> None:
        """`rate` requests arrive at each step, of about these lengths; at most 40 wait."""
        for _ in range(num_steps):
            if self.scheduler.load().num_waiting < 40 and self._rng.random() < rate:
                self.add(self._about(prompt_len), self._about(max_tokens))
            self.step()

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        self.num_steps += 1
        drawn = tuple((7,) * sequence.num_draws for sequence in plan.sequences)
        deltas = self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=drawn))
        self.num_finished += sum(delta.finish_reason is not None for delta in deltas)
        shape = shape_of(plan)
        step_s = self.costs.predict(shape) * max(0.3, self._rng.gauss(1, self._noise))
        step_s += 0.2 * (self._rng.random() < self._pauses)
        if shape.num_decodes:
            self.step_s.append(step_s)
        news = self.tuner.observe(
            plan,
            step_s=step_s,
            num_gained=sum(len(delta.token_ids) for delta in deltas),
            num_waiting=self.scheduler.load().num_waiting,
        )
        self.changes += [(self.num_steps, recommendation) for recommendation in news]
        if self.tuner.acts:
            self.scheduler.policy.limits = self.tuner.next_limits()

    def _about(self, length: int) -> int:
        return self._rng.randint(length // 2, length * 3 // 2)
