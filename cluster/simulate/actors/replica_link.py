"""Replica's end of a simulated link: the counterpart of `worker/replica/link_server.py`, with plain data for a wire."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from holdfast.cluster.simulate.actors.costly_message import LoopCosts
from holdfast.cluster.simulate.kernel.network import Connection
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.cluster.simulate.kernel.timeline import Violation
from holdfast.router.events import SendSubmit
from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import Window
from holdfast.worker.request import AttemptKey, EngineRequest, GroupKey
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Proposer, Speculation
from holdfast.worker.scheduler.step_time import StepCosts
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import PlainTokens, StepUpdate
from holdfast.worker.wire.link_responses import attempt_number


class SimulatedReplicaLink:
    """One router's connection: a `StepListener` that sends the updates."""

    def __init__(self, name: str, replica: Process, connection: Connection, costs: LoopCosts) -> None:
        self._costs = costs
        self._name = name
        self._replica = replica
        self._connection = connection
        self._due: dict[Hashable, int] = {}  # the next output position, by attempts that have had no last word

    @property
    def num_unanswered(self) -> int:
        """Attempts that have had no final answer."""
        return len(self._due)

    def key(self, attempt: int) -> AttemptKey:
        """The engine's key of an attempt of this link."""
        return AttemptKey(self._name, attempt)

    def take_in(self, submit: SendSubmit) -> tuple[AttemptKey, EngineRequest]:
        """The key and the request of a submission, for the engine."""
        attempt, request = self.key(submit.attempt), submit.request
        self._due[attempt] = len(request.output_token_ids)
        if request.group_id:
            request = replace(request, group_id=GroupKey(self._name, str(request.group_id)))
        return attempt, request

    def on_update(self, update: StepUpdate) -> None:
        """Sends the update once the replica's event loop has written it."""
        self._check(update)
        cost_s = partial(self._costs.of_update, update)
        self._replica.loop.call(cost_s, self._connection.send, self._replica, _for_router(update))

    def on_failure(self, error: HoldfastError) -> None:
        """The stream ends."""
        self._replica.hang_up(self._connection)

    def _check(self, update: StepUpdate) -> None:
        """Checks that tokens come without gap or overlap, and nothing after a final answer."""
        for delta in update.deltas:
            due = self._due.pop(delta.attempt, None)
            if due != delta.first_token_index:
                raise Violation(f"{self._replica}: {delta}, and the expected one is {due}")
            if delta.finish_reason is None:
                self._due[delta.attempt] = due + len(delta.token_ids)
        for rejection in update.rejections:
            if self._due.pop(rejection.attempt, None) is None:
                raise Violation(f"{self._replica}: {rejection} after the last word")


def _for_router(update: StepUpdate) -> StepUpdate:
    """The update as it crosses the wire: of a key, the number alone, and plain tokens in columns."""
    plain, others = PlainTokens.split(update.deltas)
    return replace(
        update,
        plain=plain._replace(attempts=[attempt_number(attempt) for attempt in plain.attempts]),
        deltas=[replace(delta, attempt=attempt_number(delta.attempt)) for delta in others],
        rejections=[replace(item, attempt=attempt_number(item.attempt)) for item in update.rejections],
        fetched_ahead=[one._replace(attempt=attempt_number(one.attempt)) for one in update.fetched_ahead],
    )


class Runner(Protocol):
    """Runs a plan; virtual time does not pass."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """Shape of every replica of a simulation."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    prefix_caching: bool
    step_costs: StepCosts
    make_runner: Callable[[int, int, int, Window | None], Runner]
    """Maker of a runner from the number of blocks, their size, the number of state slots, and the window."""
    kv_bytes_per_token: int = 0
    """Bytes of a token's keys and values, which determine how long a transfer takes; 0: unknown."""
    num_state_slots: int = 0
    """0: the model keeps no states."""
    state_blocks: int = 0
    """Number of blocks whose memory one slot occupies; 0: slots have separate memory."""
    window: Window | None = None
    """Window of layers that give their blocks back; None: the model keeps no states."""
    num_drafts: int = 0
    """Tokens guessed ahead for a sequence, at most."""
    make_proposer: Callable[[], Proposer] | None = None
    """Maker of a proposer of drafts; None: there are no drafts."""
    max_loras: int = 0
    """Adapters that are resident at a time; 0: none is served."""
    adapter_load_s: float = 0.0
    """Seconds that an adapter takes to load, beside the steps."""

    def make_scheduler(self) -> Scheduler:
        """The real scheduler of a replica of this shape."""
        return Scheduler(
            self.scheduler,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            prefix_caching=self.prefix_caching,
            num_state_slots=self.num_state_slots,
            state_blocks=self.state_blocks,
            window=self.window,
            drafter=self._speculation(),
        )

    def _speculation(self) -> Speculation | None:
        if self.make_proposer is None:
            return None
        config = SpeculationConfig(speculative="ngram", num_speculative_tokens=self.num_drafts)
        return Speculation(config, self.scheduler, self.make_proposer())
