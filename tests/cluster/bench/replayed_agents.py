"""Agents on an engine's core with a store below its cache, in virtual time: no model, no disk and no thread.

Steps take as long as a fixed model says, and one thread reads and writes blocks at fixed speeds, reading first.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from holdfast.cluster.bench.agents import AgentWorkload
from holdfast.cluster.bench.summary import RequestRecord
from holdfast.cluster.bench.workload import Session
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.tier_mover import MoverCounts, Place, TierShape
from holdfast.worker.request import EngineRequest, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_time import StepCosts, StepTimeModel, shape_of
from holdfast.worker.step_plan import StateCopy, StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.worker.engine.played_tier import PlayedMover

BLOCK_BYTES = 368 << 10
COSTS = StepCosts(base_s=6e-3, decode_s=1e-3, token_s=1.5e-3, context_token_s=2e-7)
STAGED_BYTES = 32 << 20
_TEMPLATE = 20, 8  # tokens of a chat template before a conversation, and in each turn


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), action))

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else float("inf")

    def run_until(self, time_s: float) -> None:
        while self.next_s <= time_s:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = max(self.now, time_s)


class TimedMover(PlayedMover):
    """A mover whose thread takes time."""

    def __init__(self, clock: Clock, post: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self.counts = MoverCounts()
        self.counts.read_s_per_byte, self.counts.write_s_per_byte = 3e-9, 5e-10
        self.can_ask, self.keeps = False, True
        self.tier: BlockTier
        self._clock, self._post = clock, post
        self._reads: dict[int, deque[Sequence[bytes]]] = {}
        self._writes: deque[Sequence[bytes]] = deque()
        self._is_busy = False

    def store(self, places: Sequence[Place]) -> None:
        self._writes.append([name for name, _ in places])
        self._go_on()

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        if not names:
            self._reads.pop(ticket, None)
            return
        self._reads[ticket] = deque(names[first : first + piece] for first in range(0, len(names), piece))
        self._go_on()

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        return [True] * len(places)

    def _go_on(self) -> None:
        self.has_room = self.keeps and sum(map(len, self._writes)) * BLOCK_BYTES < STAGED_BYTES
        if self._is_busy:
            return
        ticket = next((ticket for ticket, pieces in self._reads.items() if pieces), None)
        if ticket is not None:
            names, each_s = self._reads[ticket].popleft(), self.counts.read_s_per_byte
            self._work(len(names) * each_s, lambda: self.tier.restores.note_piece(ticket))
        elif self._writes:
            names, each_s = self._writes.popleft(), self.counts.write_s_per_byte
            self._work(len(names) * each_s, lambda: self.tier.learn(names, ()))

    def _work(self, s_per_byte: float, tell: Callable[[], None]) -> None:
        def done() -> None:
            self._is_busy = False
            self._post(tell)
            self._go_on()

        self._is_busy = True
        self._clock.at(self._clock.now + BLOCK_BYTES * s_per_byte, done)


class Conversation:
    """One agent's session. A turn is due after its pause."""

    def __init__(self, session: Session, replay: "Replay") -> None:
        self._session, self._replay = session, replay
        self._rng = random.Random(session.number)
        self._tokens = self._words(_TEMPLATE[0])
        self._turn = 0

    def _words(self, number: int) -> list[int]:
        return [self._rng.randrange(50_000) for _ in range(number)]

    def ask(self) -> None:
        turn = self._session.turns[self._turn]
        self._tokens += self._words(turn.num_prompt_tokens + _TEMPLATE[1])
        self._record = RequestRecord(
            session=self._session.number,
            turn=self._turn,
            due_s=self._replay.clock.now,
            num_prompt_tokens=len(self._tokens),
        )
        self._replay.records.append(self._record)
        params = SamplingParams(max_tokens=turn.num_output_tokens, ignore_eos=True)
        name = f"{self._session.number}/{self._turn}"
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(self._tokens), sampling_params=params)
        self._replay.submit(request, self)

    def take(self, delta: TokenDelta) -> None:
        now = self._replay.clock.now
        if not self._record.piece_s:
            self._record.num_cached_tokens = delta.num_cached_tokens
        self._record.piece_s.append(now)
        self._record.num_output_tokens += len(delta.token_ids)
        self._tokens += delta.token_ids
        if delta.finish_reason is not None:
            self._record.end_s = now
            self._turn += 1
            if self._turn < len(self._session.turns):
                self._replay.clock.at(now + self._session.turns[self._turn].pause_s, self.ask)


class Replay:
    """Sessions of `num_agents` agents, to their end. Afterwards `records` has all requests."""

    def __init__(self, workload: AgentWorkload, num_agents: int, num_blocks: int, *, keeps: bool = True) -> None:
        """`keeps`: whether anything is stored."""
        self.clock, self.records = Clock(), list[RequestRecord]()
        self._inbox: list[Callable[[], None]] = []
        self._asking: dict[str, Conversation] = {}
        self._rng = random.Random(0)
        self._scheduler = Scheduler(
            SchedulerConfig(), num_blocks=num_blocks, block_size=16, max_model_len=8192, eos_token_ids=frozenset()
        )
        self._core = EngineCore(self._scheduler)
        mover, steps = TimedMover(self.clock, self._inbox.append), StepTimeModel(COSTS)
        mover.has_room = mover.keeps = keeps
        steps.num_samples = 1
        self.tier = mover.tier = BlockTier(
            *(*self._scheduler.caches, mover, TierShape(block_bytes=BLOCK_BYTES, num_threads=2), steps.prefill_s),
            *(self._scheduler.num_awaited_blocks, self._scheduler.can_preempt, self._scheduler.pinning),
        )
        self._core.put_below(self.tier)
        self._core.attach(self)
        for session, _ in zip(workload.sessions(), range(num_agents), strict=False):
            self.clock.at(session.start_s, Conversation(session, self).ask)

    def submit(self, request: EngineRequest, conversation: Conversation) -> None:
        self._asking[request.request_id] = conversation
        self._inbox.append(lambda: self._core.submit(request, self, self.clock.now))

    def on_update(self, update: StepUpdate) -> None:
        assert not update.rejections, update.rejections
        for delta in update.deltas:
            self._asking[str(delta.attempt)].take(delta)

    def ask_in_doubt(self) -> bool:
        return False

    def run(self) -> None:
        while True:
            self.clock.run_until(self.clock.now)
            while self._inbox:
                self._inbox.pop(0)()
            if not self._scheduler.has_work:
                self._core.tend_tier(self.clock.now)
            plan = self._scheduler.plan(self.clock.now)
            if plan is not None:
                self._step(plan)
            elif not self._scheduler.has_work:
                due_s = self.clock.now + self._core.most_idle_s(self.clock.now, float("inf"))
                if (next_s := min(self.clock.next_s, due_s)) == float("inf"):
                    return
                self.clock.run_until(next_s)
            self._tell()

    def _step(self, plan: StepPlan) -> None:
        step_s = COSTS.predict(shape_of(plan))
        self.clock.run_until(self.clock.now + step_s)
        drawn = tuple((self._rng.randrange(50_000),) * sequence.num_draws for sequence in plan.sequences)
        self._core.commit(plan, StepResult(step_id=plan.step_id, token_ids=drawn), step_s)
        self._tell()
        self._core.tend_tier(self.clock.now, step_s)

    def _tell(self) -> None:
        for _, update in self._core.take_updates():
            self.on_update(update)
