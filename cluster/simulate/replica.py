"""A replica that is simulated: the real scheduler and blocks, run in virtual time, and its end of the links.

The turn of `worker/engine.py` and the bookkeeping of `worker/link.py`, without their threads and wires: commands are
taken in between two steps, a step takes time, and each router hears once a step of its own requests. What may not live
here: decisions, which are the scheduler's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from cluster.simulate.messages import Dial, Hello, Retiring
from cluster.simulate.network import Connection, Network
from cluster.simulate.process import Process
from cluster.simulate.pseudo_model import PoisonedError
from cluster.simulate.step_model import StepModel
from router.events import AttemptDelta, AttemptRejection, ReplicaFacts, SendAbort, SendSubmit, StepNews
from worker.cache_feed import CacheFeed
from worker.config import SchedulerConfig, SpeculationConfig
from worker.errors import DeadlineExceededError, HoldfastError
from worker.plan import StepPlan, StepResult
from worker.progress import FrozenVerdict
from worker.request import EngineRequest, TokenDelta
from worker.scheduler import Scheduler
from worker.speculation import Proposer, Speculation
from worker.suspects import Suspects

MODEL: Final = "pseudo"
WATCH_S: Final = 0.2
"""Between two looks of the supervisor at a replica."""
RESTART_S: Final = 0.5


class Runner(Protocol):
    """What runs a plan, in no time."""

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """What every replica of a simulation is like."""

    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    prefix_caching: bool
    step_model: StepModel
    make_runner: Callable[[int, int], Runner]
    """From the number of blocks and their size."""
    num_drafts: int = 0
    """Tokens guessed ahead for a sequence, at most."""
    make_proposer: Callable[[], Proposer] | None = None
    """Who guesses; None: nobody."""

    def speculation(self) -> Speculation | None:
        if self.make_proposer is None:
            return None
        config = SpeculationConfig(speculative="ngram", num_speculative_tokens=self.num_drafts)
        return Speculation(config, self.scheduler, self.make_proposer())


@dataclass(slots=True, eq=False)
class Session:
    """One router's link, as the replica sees it."""

    name: str
    cache: CacheFeed
    attempts: dict[str, int] = field(default_factory=dict)
    """By the request id that the scheduler knows."""
    deltas: list[AttemptDelta] = field(default_factory=list)
    rejections: list[AttemptRejection] = field(default_factory=list)


class SimulatedReplica(Process):
    """One replica, life after life."""

    def __init__(self, site: str, network: Network, shape: ReplicaShape) -> None:
        super().__init__(site, network)
        self.shape = shape
        # Those that wait anew, after a preemption, come on top of those that have never run.
        self.max_num_waiting = shape.scheduler.max_num_waiting + shape.scheduler.max_num_seqs
        self.slowness = 1.0
        """Factor on the time of a step."""
        self.num_condemned = 0
        """Times it was killed because it was frozen."""
        self.num_poisoned = 0
        """Times that a request brought it down."""
        self.busy_s = 0.0
        """Spent in steps, in all lives."""
        self.num_steps = 0
        """In all lives."""
        self.num_tokens = 0
        """Drawn in all lives."""

    def on_start(self) -> None:
        shape = self.shape
        self.scheduler = Scheduler(
            shape.scheduler,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=shape.max_model_len,
            eos_token_ids=shape.eos_token_ids,
            prefix_caching=shape.prefix_caching,
            speculation=shape.speculation(),
        )
        self.sessions: dict[Connection, Session] = {}
        self.verdict = FrozenVerdict()
        self.load = self.scheduler.load()
        self._runner = shape.make_runner(shape.num_blocks, shape.block_size)
        self._owners: dict[str, Session] = {}
        self._suspects: Suspects[Session] = Suspects()
        self._inbox: list[tuple[Connection, Any]] = []
        self._is_stepping = False
        self._num_links = 0
        self.is_retiring = False

    # --- what the world does to it ---

    def freeze(self) -> None:
        """Its supervisor watches how long it stands still."""
        super().freeze()
        self.timeline.after(WATCH_S, self._watch, self.num_lives)

    def retire(self, is_retiring: bool) -> None:
        """Tells every router that it takes nothing new, or does so again."""
        if self.is_up and not self.is_frozen:
            self.is_retiring = is_retiring
            for connection in self.sessions:
                connection.send(self, Retiring(is_retiring=is_retiring))

    def replace(self) -> None:
        """A rolling update: if it was to go, it goes, and the next one comes."""
        if self.is_up and self.is_retiring:
            self.kill()
            self.timeline.after(RESTART_S, self.revive)

    def recover(self) -> None:
        """It is as fast as ever again."""
        self.slowness = 1.0

    def _watch(self, life: int) -> None:
        if not self.is_frozen or life != self.num_lives:
            return
        has_work = self.has_backlog or self.scheduler.has_work
        if self.verdict.look(self.num_steps, has_work=has_work, expected_step_s=0.0, now=self.timeline.now):
            self.num_condemned += 1
            self.kill()
            self.timeline.after(RESTART_S, self.revive)
        else:
            self.timeline.after(WATCH_S, self._watch, life)

    # --- messages ---

    def on_message(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Dial):
            self._num_links += 1
            # A step that is under way may cache more; the events of that say the same again, or more.
            cache = CacheFeed(self.scheduler.cached_block_hashes())
            session = self.sessions[connection] = Session(f"link-{self._num_links}", cache)
            connection.send(self, Hello(facts=self._facts(), load=self._suspects.load_for(session, self.load)))
            if self.is_retiring:
                connection.send(self, Retiring(is_retiring=True))
        else:
            self._post(connection, message)

    def on_closed(self, connection: Connection) -> None:
        self._post(connection, None)

    def _post(self, connection: Connection, command: Any) -> None:
        self._inbox.append((connection, command))
        if not self._is_stepping:
            self._turn()

    # --- the turn of the engine ---

    def _turn(self) -> None:
        inbox, self._inbox = self._inbox, []
        for connection, command in inbox:
            session = self.sessions.get(connection)
            if session is not None:
                self._obey(connection, session, command)
        plan = self.scheduler.plan(self.clock)
        for request_id in self.scheduler.take_expired():
            self._expire(request_id)
        if plan is None:
            self._deliver(stepped=False)
            return
        if self._suspects.has_news and len(self.sessions) > 1:
            self._deliver(stepped=False)
        self._is_stepping = True
        seconds = self.shape.step_model.seconds(plan) * self.slowness
        self.busy_s += seconds
        self.after(seconds, self._finish_step, plan)

    def _finish_step(self, plan: StepPlan) -> None:
        try:
            result = self._runner.run(plan)
        except PoisonedError:
            self.num_poisoned += 1
            self.kill()
            self.timeline.after(RESTART_S, self.revive)
            return
        for delta in self.scheduler.commit(plan, result):
            self._keep(delta)
        self.num_steps += 1
        self._is_stepping = False
        self._deliver(stepped=True)
        self._turn()

    def _obey(self, connection: Connection, session: Session, command: Any) -> None:
        match command:
            case SendSubmit():
                self._submit(session, command)
            case SendAbort():
                self._abort(f"{session.name}/{command.attempt}")
            case None:
                for request_id in list(session.attempts):
                    self._abort(request_id)
                del self.sessions[connection]

    def _submit(self, session: Session, command: SendSubmit) -> None:
        request_id = f"{session.name}/{command.attempt}"
        request = _renamed(command.request, session.name, request_id)
        try:
            self._suspects.check(request, session)
            finished = self.scheduler.add(request, self.clock)
        except HoldfastError as error:
            session.rejections.append(AttemptRejection(attempt=command.attempt, error=error))
            return
        session.attempts[request_id] = command.attempt
        self._owners[request_id] = session
        self._suspects.add(request, session)
        if finished is not None:
            self._keep(finished)

    def _abort(self, request_id: str) -> None:
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self._keep(delta)

    def _expire(self, request_id: str) -> None:
        session = self._owners.pop(request_id)
        self._suspects.drop(request_id)
        error = DeadlineExceededError("the request's time was up in the replica")
        session.rejections.append(AttemptRejection(attempt=session.attempts.pop(request_id), error=error))

    def _keep(self, delta: TokenDelta) -> None:
        session = self._owners[delta.request_id]
        attempt = session.attempts[delta.request_id]
        if delta.finish_reason is not None:
            del self._owners[delta.request_id], session.attempts[delta.request_id]
        self._suspects.note(delta)
        self.num_tokens += len(delta.token_ids)
        session.deltas.append(
            AttemptDelta(
                attempt=attempt,
                first_token_index=delta.first_token_index,
                token_ids=delta.token_ids,
                finish_reason=delta.finish_reason,
                num_cached_tokens=delta.num_cached_tokens,
            )
        )

    def _deliver(self, *, stepped: bool) -> None:
        before, self.load = self.load, self.scheduler.load()
        concerns_all = stepped or self.load != before or self._suspects.has_news
        self._suspects.has_news = False
        events = self.scheduler.take_cache_events() if self.shape.prefix_caching else []
        for connection, session in self.sessions.items():
            session.cache.note(events)
            if concerns_all or session.deltas or session.rejections or session.cache.has_news:
                cache = session.cache.take()
                news = StepNews(
                    load=self._suspects.load_for(session, self.load),
                    deltas=session.deltas,
                    rejections=session.rejections,
                    stored=cache.stored,
                    evicted=cache.evicted,
                )
                session.deltas, session.rejections = [], []
                connection.send(self, news)

    # --- what can be asked ---

    @property
    def num_attempts(self) -> int:
        """Attempts that run or wait here, of all routers."""
        return len(self._owners)

    def check_integrity(self) -> None:
        """Asserts that scheduler, blocks and links agree."""
        self.scheduler.check_integrity()
        known = {request_id for session in self.sessions.values() for request_id in session.attempts}
        assert known == self._owners.keys(), "the sessions and the owners of requests differ"
        assert self.scheduler.has_work == bool(self._owners), "the scheduler and the links differ"

    def _facts(self) -> ReplicaFacts:
        return ReplicaFacts(
            replica_id=f"{self.site}.{self.num_lives}",
            model=MODEL,
            max_model_len=self.shape.max_model_len,
            vocab_size=self.shape.vocab_size,
            tensor_parallel_size=1,
            block_size=self.shape.block_size,
            num_blocks=self.shape.num_blocks,
            row_invariant=True,
        )


def _renamed(request: EngineRequest, link: str, request_id: str) -> EngineRequest:
    """As the replica knows it: routers do not know each other's names."""
    group_id = f"{link}/{request.group_id}" if request.group_id else ""
    return replace(request, request_id=request_id, group_id=group_id)
