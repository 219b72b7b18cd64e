"""One poisonous request among innocent ones: it is found, it takes few replicas with it, and nobody else fails."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import RouterConfig
from router.events import Action, Deliver, Fail, SendAbort, SendSubmit
from tests.router.core import Core, delta, load
from worker.errors import RequestQuarantinedError
from worker.request import FinishReason

NUM_TOKENS = 20
POISON = "poison"


class Cluster:
    """Replicas that draw a token a step for all they run, and die when they have to draw the poison's deadly token."""

    def __init__(self, num_replicas: int, max_replicas_lost: int, deadly_index: int) -> None:
        self.core = Core(RouterConfig(max_replicas_lost=max_replicas_lost))
        self.deadly_index = deadly_index
        self.running: dict[str, dict[int, tuple[str, int]]] = {}
        self.num_deaths = 0
        self.finished: set[str] = set()
        self.failed: dict[str, Exception] = {}
        for index in range(num_replicas):
            self.start(f"r{index}")

    def start(self, replica_id: str) -> None:
        self.running[replica_id] = {}
        self.perform(self.core.up(replica_id))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendSubmit(request=request):
                    done = len(request.output_token_ids)
                    self.running[action.replica_id][action.attempt] = (request.request_id, done)
                case SendAbort():
                    self.running[action.replica_id].pop(action.attempt, None)
                case Deliver(finish_reason=reason) if reason is not None:
                    self.finished.add(action.request_id)
                case Fail():
                    self.failed[action.request_id] = action.error

    def step(self, replica_id: str) -> None:
        mine = self.running[replica_id]
        if (POISON, self.deadly_index) in mine.values():
            self.num_deaths += 1
            del self.running[replica_id]
            self.perform(self.core.down(replica_id))
            self.start(f"{replica_id}'")
            return
        deltas = []
        for attempt, (request_id, done) in list(mine.items()):
            mine[attempt] = (request_id, done + 1)
            finish = FinishReason.LENGTH if done + 1 == NUM_TOKENS else None
            deltas.append(delta(attempt, done, 1, finish=finish))
            if finish is not None:
                del mine[attempt]
        self.perform(self.core.step(*deltas, replica_id=replica_id, load=load(num_running=len(mine))))


@given(
    num_innocent=st.integers(0, 6),
    place=st.integers(0, 6),
    num_replicas=st.integers(1, 3),
    max_replicas_lost=st.integers(1, 3),
    deadly_index=st.integers(0, NUM_TOKENS - 1),
)
@settings(max_examples=150, deadline=None)
def test_the_poison_is_found_and_nobody_else_fails(num_innocent, place, num_replicas, max_replicas_lost, deadly_index):
    cluster = Cluster(num_replicas, max_replicas_lost, deadly_index)
    innocent = [f"innocent {index}" for index in range(num_innocent)]
    for name in [*innocent[:place], POISON, *innocent[place:]]:
        cluster.perform(cluster.core.submit(name, timeout_s=10_000))
    for _ in range(1000):
        if not cluster.core.dispatch.num_open:
            break
        for replica_id in list(cluster.running):
            if replica_id in cluster.running:
                cluster.step(replica_id)
        cluster.perform(cluster.core.tick(after_s=1.0))
    assert cluster.finished == set(innocent)
    assert set(cluster.failed) == {POISON}
    assert isinstance(cluster.failed[POISON], RequestQuarantinedError)
    assert cluster.num_deaths <= max_replicas_lost + 1
