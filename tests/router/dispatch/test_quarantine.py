"""One poisonous request among innocent ones: it is found, it takes few replicas with it, and nobody else fails."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.config import RouterConfig
from holdfast.router.events import Action, Fail, SendAbort, SendSubmit
from holdfast.router.generation import OutputDelta
from holdfast.worker.engine.request_guards import Suspects
from holdfast.worker.errors import HoldfastError, RequestQuarantinedError
from holdfast.worker.request import FinishReason, PoisonRisk, TokenDelta
from holdfast.worker.step_update import Rejection
from tests.examples import examples
from tests.router.core import Core, delta, failure, load, sent

NUM_TOKENS = 20
POISON = "poison"


@dataclass
class Replica:
    """Draws a token a step for all it runs. What comes in is taken between two steps."""

    suspects: Suspects[int] = field(default_factory=Suspects)
    inbox: list[tuple[int, SendSubmit]] = field(default_factory=list)
    """Each with the router that it comes from."""
    running: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """By router and attempt: the request, and its tokens so far."""


class Cluster:
    """Replicas that die when they have to draw the poison's deadly token, and routers that share them."""

    def __init__(self, num_replicas: int, max_replicas_lost: int, deadly_index: int, num_routers: int = 1) -> None:
        self.cores = [Core(RouterConfig(max_replicas_lost=max_replicas_lost)) for _ in range(num_routers)]
        self.deadly_index = deadly_index
        self.replicas: dict[str, Replica] = {}
        self.num_deaths = 0
        self.finished: set[str] = set()
        self.failed: dict[str, Exception] = {}
        for index in range(num_replicas):
            self.start(f"r{index}")

    def start(self, replica_id: str) -> None:
        self.replicas[replica_id] = Replica()
        for router, core in enumerate(self.cores):
            self.perform(router, core.up(replica_id))

    def submit(self, request_id: str, router: int) -> None:
        self.perform(router, self.cores[router].submit(request_id, timeout_s=10_000))

    def perform(self, router: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendSubmit():
                    self.replicas[action.replica_id].inbox.append((router, action))
                case SendAbort():
                    self.abort(self.replicas[action.replica_id], router, action.attempt)
                case OutputDelta(finish_reason=reason) if reason is not None:
                    self.finished.add(action.request_id)
                case Fail():
                    self.failed[action.request_id] = action.error

    def abort(self, replica: Replica, router: int, attempt: int) -> None:
        replica.inbox = [item for item in replica.inbox if (item[0], item[1].attempt) != (router, attempt)]
        replica.running.pop((router, attempt), None)
        replica.suspects.drop((router, attempt))

    def step(self, replica_id: str) -> None:
        replica = self.replicas[replica_id]
        self.take_inbox(replica_id, replica)
        if (POISON, self.deadly_index) in replica.running.values():
            self.num_deaths += 1
            del self.replicas[replica_id]
            for router, core in enumerate(self.cores):
                self.perform(router, core.down(replica_id))
            self.start(f"{replica_id}'")
            return
        deltas = {router: [] for router in range(len(self.cores))}
        for (router, attempt), (request_id, done) in list(replica.running.items()):
            finish = FinishReason.LENGTH if done + 1 == NUM_TOKENS else None
            deltas[router].append(delta(attempt, done, 1, finish=finish))
            replica.running[router, attempt] = (request_id, done + 1)
            key = (router, attempt)
            replica.suspects.note(
                [TokenDelta(attempt=key, first_token_index=done, token_ids=(1,), finish_reason=finish)]
            )
            if finish is not None:
                del replica.running[router, attempt]
        self.tell(replica_id, replica, deltas)

    def take_inbox(self, replica_id: str, replica: Replica) -> None:
        """Other suspects are reported before the step; what that brings in is not part of it."""
        inbox, replica.inbox = replica.inbox, []
        for router, submit in inbox:
            request = submit.request
            try:
                replica.suspects.check(request.poison_risk, router)
            except HoldfastError as error:
                refusal = Rejection(attempt=submit.attempt, error=error)
                self.perform(router, self.cores[router].step(replica_id=replica_id, rejections=[refusal]))
                continue
            replica.suspects.add((router, submit.attempt), request.poison_risk, router)
            done = len(request.output_token_ids)
            replica.running[router, submit.attempt] = (submit.request.request_id, done)
        if replica.suspects.has_news:
            replica.suspects.has_news = False
            self.tell(replica_id, replica, {router: [] for router in range(len(self.cores))})

    def tell(self, replica_id: str, replica: Replica, deltas: dict[int, list]) -> None:
        for router, core in enumerate(self.cores):
            message = replica.suspects.load_for(router, load(num_running=len(replica.running)))
            self.perform(router, core.step(*deltas[router], replica_id=replica_id, load=message))

    def run(self) -> None:
        for _ in range(2000):
            if not any(core.dispatch.num_open for core in self.cores):
                return
            for replica_id in list(self.replicas):
                if replica_id in self.replicas:
                    self.step(replica_id)
            for router, core in enumerate(self.cores):
                self.perform(router, core.tick(after_s=1.0))


@given(
    num_innocent=st.integers(0, 6),
    place=st.integers(0, 6),
    num_replicas=st.integers(1, 3),
    max_replicas_lost=st.integers(1, 3),
    deadly_index=st.integers(0, NUM_TOKENS - 1),
)
@settings(max_examples=examples(150), deadline=None)
def test_the_poison_is_found_and_nobody_else_fails(num_innocent, place, num_replicas, max_replicas_lost, deadly_index):
    cluster = Cluster(num_replicas, max_replicas_lost, deadly_index)
    innocent = [f"innocent {index}" for index in range(num_innocent)]
    for name in [*innocent[:place], POISON, *innocent[place:]]:
        cluster.submit(name, router=0)
    cluster.run()
    check(cluster, innocent, max_replicas_lost)


@given(
    routers=st.lists(st.integers(0, 2), max_size=9),
    place=st.integers(0, 9),
    num_replicas=st.integers(1, 4),
    max_replicas_lost=st.integers(2, 3),
    deadly_index=st.integers(0, NUM_TOKENS - 1),
)
@settings(max_examples=examples(150), deadline=None)
def test_nobody_at_any_router_is_taken_for_the_poison_of_one(
    routers, place, num_replicas, max_replicas_lost, deadly_index
):
    cluster = Cluster(num_replicas, max_replicas_lost, deadly_index, num_routers=3)
    innocent = [f"innocent {index}" for index in range(len(routers))]
    arrivals = list(zip(innocent, routers, strict=True))
    for name, router in [*arrivals[:place], (POISON, 0), *arrivals[place:]]:
        cluster.submit(name, router)
    cluster.run()
    check(cluster, innocent, max_replicas_lost)


def check(cluster: Cluster, innocent: list[str], max_replicas_lost: int) -> None:
    assert cluster.finished == set(innocent)
    assert set(cluster.failed) == {POISON}
    assert isinstance(cluster.failed[POISON], RequestQuarantinedError)
    assert cluster.num_deaths <= max_replicas_lost + 1


def test_replicas_are_told_how_far_a_request_is_under_suspicion():
    core = core_with_replicas("a", "b")
    assert sent(core.submit("x")).request.poison_risk is PoisonRisk.NONE
    assert sent(core.down("a")).request.poison_risk is PoisonRisk.SUSPECT
    core.step(replica_id="b", load=beside_suspects(1))
    core.down("b")
    assert sent(core.up("c")).request.poison_risk is PoisonRisk.ON_TRIAL


def test_a_request_that_no_replica_has_died_of_is_no_suspect_however_few_may_die():
    core = Core(RouterConfig(max_replicas_lost=1))
    core.up("a")
    assert sent(core.submit("x")).request.poison_risk is PoisonRisk.NONE


def test_a_death_beside_suspects_of_another_router_convicts_nobody():
    core = core_with_replicas("a")
    core.submit("x")
    for name, after in ("ab", "bc", "cd"):
        core.step(replica_id=name, load=beside_suspects(1))
        core.down(name)
        assert sent(core.up(after)).request.request_id == "x"
    assert isinstance(failure(core.down("d")).error, RequestQuarantinedError)


def test_a_suspect_waits_for_a_replica_without_others_and_holds_nobody_up():
    core = core_with_replicas("a", "b")
    core.submit("x")
    core.down("a")
    core.step(replica_id="b", load=beside_suspects(1))
    core.down("b")
    core.up("c", load=beside_suspects(1))
    assert core.dispatch.num_queued == 1
    assert sent(core.submit("new")).replica_id == "c"
    assert sent(core.step(replica_id="c")).request.request_id == "x"


def test_a_suspect_that_cannot_leave_a_retiring_replica_keeps_nobody_else_there():
    core = core_with_replicas("a")
    core.submit("x")
    for name, after in ("ab", "bc"):
        core.step(replica_id=name, load=beside_suspects(1))
        core.down(name)
        assert sent(core.up(after)).request.request_id == "x"
    core.submit("new")
    core.up("d", load=beside_suspects(1))
    moved = core.dispatch.replica_retiring("c", True, core.now)
    assert [(type(action).__name__, action.replica_id) for action in moved] == [("SendAbort", "c"), ("SendSubmit", "d")]
    assert sent(moved).request.request_id == "new"
    assert [sent(core.step(replica_id="d")).request.request_id] == ["x"]


def test_even_among_suspects_of_others_there_is_an_end():
    core = core_with_replicas("r0")
    core.submit("x")
    for number in range(7):
        core.step(replica_id=f"r{number}", load=beside_suspects(1))
        core.down(f"r{number}")
        core.up(f"r{number + 1}")
    core.step(replica_id="r7", load=beside_suspects(1))
    assert isinstance(failure(core.down("r7")).error, RequestQuarantinedError)


def core_with_replicas(*names: str) -> Core:
    core = Core()
    for name in names:
        core.up(name)
    return core


def beside_suspects(num_foreign_suspects: int):
    return replace(load(num_running=1), num_foreign_suspects=num_foreign_suspects)
