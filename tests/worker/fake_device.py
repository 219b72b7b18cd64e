"""A device that runs one step while the next is planned and launched, in virtual time, over a pseudo-model.

It looks at what it is given as no real device does: that two steps are in flight at most, that what is pending in a
step is drawn by the step just before, and that no step writes to a block that another request uses in a step before it.
"""

from collections import deque
from collections.abc import Callable

from holdfast.worker.engine.steps_in_flight import OverlappingRunner
from holdfast.worker.pending_tokens import has_pending, with_tokens
from holdfast.worker.step_plan import PENDING, StepPlan, StepResult


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeDevice(OverlappingRunner):
    """`model` runs a plan, at once; the device takes `step_s` for it, beginning when it is free."""

    def __init__(
        self,
        model,
        block_size: int,
        clock: VirtualClock,
        *,
        step_s: Callable[[StepPlan], float] = lambda plan: 1.0,
        may_follow: Callable[[StepPlan], bool] = lambda plan: True,
    ) -> None:
        self.model = model
        self.num_launched = self.num_ahead = self.num_pending = self.most_in_flight = 0
        self.plans: list[StepPlan] = []
        self._block_size = block_size
        self._clock = clock
        self._step_s = step_s
        self._may_follow = may_follow
        self._free_at_s = 0.0
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._landed: tuple[StepPlan | None, StepResult | None] = (None, None)

    def launch(self, plan: StepPlan) -> None:
        self._check(plan)
        self.num_ahead += bool(self._in_flight)
        self.num_launched += 1
        self._free_at_s = max(self._clock.now, self._free_at_s) + self._step_s(plan)
        self._in_flight.append((plan, self._free_at_s))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.plans.append(plan)

    def may_follow(self, plan: StepPlan) -> bool:
        assert plan is self._in_flight[-1][0], "asked of the step that was launched last"
        return self._may_follow(plan)

    def collect(self) -> StepResult:
        plan, done_s = self._in_flight.popleft()
        self._clock.now = max(self._clock.now, done_s)
        known = with_tokens(plan, *self._landed)
        assert not has_pending(known)
        result = self.model.run(known)
        self._landed = (known, result)
        return result

    def keep_alive(self) -> None:
        assert not self._in_flight

    def close(self) -> None:
        self.closed = True

    def _check(self, plan: StepPlan) -> None:
        assert len(self._in_flight) < 2, "a third step is in flight"
        drawn = set()
        if self._in_flight:
            before, _ = self._in_flight[-1]
            assert self._may_follow(before), "a step that nothing may follow"
            drawn = {share.sequence_id for share in before.sequences if share.num_draws}
        for share in plan.sequences:
            if PENDING in share.token_ids:
                self.num_pending += 1
                assert share.sequence_id in drawn, "a token that no step draws"
            self._check_blocks(share)

    def _check_blocks(self, share) -> None:
        end = share.first_position + len(share.token_ids) - 1
        written = set(share.block_ids[share.first_position // self._block_size : end // self._block_size + 1])
        for before, _ in self._in_flight:
            for other in before.sequences:
                is_same = other.sequence_id == share.sequence_id
                assert is_same or not written & set(other.block_ids), "a block is written to that a step in flight uses"
