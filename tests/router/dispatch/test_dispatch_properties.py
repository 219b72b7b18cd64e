"""The dispatch core against any order of events: clients, replicas, links and time do what they like.

The replicas here answer with tokens that are a function of the request, over links that keep order within themselves
and none among each other, and that may be lost with all that is on them. After every event the books must agree; at the
end every request must have had exactly one last word, and every client a prefix of the right tokens.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import Action, Fail, SendAbort, SendSubmit
from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import HoldfastError, QueueFullError, ReplicaError, RequestAbortedError
from holdfast.worker.request import EngineRequest, FinishReason, Priority, SequenceKey, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import PlainTokens, Rejection, StepUpdate
from tests.examples import examples
from tests.router.core import LetterText, facts, load

REPLICAS = {"r0": "m", "r1": "m", "r2": "other"}
NUM_TOKENS = 6


def right_token(request_id: str, index: int) -> int:
    return (7 * int(request_id) + 3 * index) % 26


class Replica:
    """One session of a replica: what it was sent, and what is on its way back."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[str, int]] = {}
        self.on_the_way: deque[StepUpdate] = deque()

    def submit(self, action: SendSubmit) -> None:
        self.running[action.attempt] = (action.request.request_id, len(action.request.output_token_ids))

    def abort(self, attempt: int) -> None:
        """Answers an abort as an engine does, long after the router has forgotten the attempt."""
        if self.running.pop(attempt, None) is not None:
            self.say(TokenDelta(attempt=attempt, first_token_index=0, token_ids=(), finish_reason=FinishReason.ABORT))

    def step(self, num_tokens: int, num_repeated: int) -> None:
        """One step of the engine: every attempt gets tokens, and says some of the last ones again."""
        self.say(*[self.advance(attempt, num_tokens, num_repeated) for attempt in list(self.running)])

    def advance(self, attempt: int, num_tokens: int, num_repeated: int) -> TokenDelta:
        request_id, done = self.running[attempt]
        first, end = max(done - num_repeated, 0), min(done + num_tokens, NUM_TOKENS)
        self.running[attempt] = (request_id, end)
        finish = FinishReason.LENGTH if end == NUM_TOKENS else None
        if finish:
            del self.running[attempt]
        token_ids = tuple(right_token(request_id, index) for index in range(first, end))
        return TokenDelta(attempt=attempt, first_token_index=first, token_ids=token_ids, finish_reason=finish)

    def say(self, *deltas: TokenDelta, rejections: tuple[Rejection, ...] = ()) -> None:
        num_waiting = max(len(self.running) - 2, 0)
        plain, others = PlainTokens.split(deltas)  # as a link has them
        now = load(len(self.running) - num_waiting, num_waiting)
        self.on_the_way.append(StepUpdate(load=now, plain=plain, deltas=others, rejections=rejections))


class Client:
    """One request as its client sees it."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at
        self.tokens: list[int] = []
        self.text = ""
        self.num_last_words = 0
        self.is_cancelled = False
        self.finish_reason: FinishReason | None = None


class DispatchMachine(RuleBasedStateMachine):
    config = RouterConfig(max_waiting_per_replica=2, replica_wait_s=20)
    limits = LimitsConfig(max_queued=3)
    least_timeout_s = 0

    @initialize(draws=st.lists(st.integers(0, 5), min_size=1))
    def begin(self, draws):
        self.draws = deque(draws)
        self.now = 0.0
        self.dispatch = Dispatch(self.config, self.limits, self.draw)
        self.replicas: dict[str, Replica] = {}
        self.clients: dict[str, Client] = {}
        for replica_id in REPLICAS:
            self.replica_comes(replica_id)

    def draw(self, n: int) -> int:
        self.draws.rotate()
        return self.draws[0] % n

    # --- clients ---

    @rule(
        model=st.sampled_from(["m", "other"]),
        priority=st.sampled_from(Priority),
        timeout_s=st.sampled_from([5, 100]),
        stop_after=st.integers(0, 2 * NUM_TOKENS),
    )
    def submit(self, model, priority, timeout_s, stop_after):
        request_id = str(len(self.clients))
        client = Client(right_token(request_id, stop_after) if stop_after < NUM_TOKENS else None)
        self.clients[request_id] = client
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=(1,),
            sampling_params=SamplingParams(seed=0),
            priority=priority,
        )
        deadline = self.now + max(timeout_s, self.least_timeout_s)
        try:
            text = LetterText(client.stop_at)
            state = RequestState(request=request, model=model, text=text, deadline=deadline)
            actions = self.dispatch.submit(state, self.now)
        except HoldfastError:
            client.num_last_words += 1
        else:
            self.perform(actions)

    @precondition(lambda self: self.open_clients())
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(self.open_clients()))
        self.clients[request_id].is_cancelled = True
        self.clients[request_id].num_last_words += 1
        self.perform(self.dispatch.cancel(SequenceKey("", request_id), self.now))

    @precondition(lambda self: self.open_clients())
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(self.open_clients()))
        self.perform(self.dispatch.abort(SequenceKey("", request_id), self.now))
        assert self.clients[request_id].finish_reason == "abort"

    @precondition(lambda self: self.open_clients())
    @rule(data=st.data(), reads=st.booleans())
    def reader_stops_or_reads_on(self, data, reads):
        request_id = data.draw(st.sampled_from(self.open_clients()))
        decide = self.dispatch.go_on if reads else self.dispatch.suspend
        self.perform(decide(SequenceKey("", request_id), self.now))

    # --- replicas ---

    @rule(num_tokens=st.integers(0, 3), num_repeated=st.integers(0, 2), is_slow=st.booleans())
    def replicas_work(self, num_tokens, num_repeated, is_slow):
        for replica in self.replicas.values():
            replica.step(num_tokens, num_repeated)
        if not is_slow:
            self.news_arrives("r0", 9)
            self.news_arrives("r1", 9)
            self.news_arrives("r2", 9)

    @rule(replica_id=st.sampled_from(sorted(REPLICAS)), num_messages=st.integers(1, 3))
    def news_arrives(self, replica_id, num_messages):
        """Links keep order within themselves, and none among each other."""
        for _ in range(num_messages):
            replica = self.replicas.get(replica_id)
            if replica is not None and replica.on_the_way:
                self.perform(self.dispatch.step(replica_id, replica.on_the_way.popleft(), self.now))

    @rule(replica_id=st.sampled_from(sorted(REPLICAS)), data=st.data())
    def replica_has_trouble(self, replica_id, data):
        replica = self.replicas.get(replica_id)
        if replica is None:
            self.replica_comes(replica_id)
        elif data.draw(st.booleans()):
            self.perform(self.dispatch.replica_retiring(replica_id, data.draw(st.booleans()), self.now))
        elif data.draw(st.booleans()) and replica.running:
            self.replica_refuses(replica, gives_up=data.draw(st.booleans()))
        else:
            self.link_breaks(replica_id)

    # --- time ---

    @rule(seconds=st.integers(0, 8))
    def time_passes(self, seconds):
        self.now += seconds
        self.perform(self.dispatch.tick(self.now))

    # --- what must hold ---

    @invariant()
    def books_agree(self):
        if hasattr(self, "dispatch"):
            self.dispatch.check_integrity()
            assert sorted(state.request_id for state in self.dispatch._requests) == sorted(self.open_clients())

    @invariant()
    def nobody_waits_while_there_is_room(self):
        for model in set(REPLICAS.values()) if hasattr(self, "dispatch") else ():
            if (waiting := self.dispatch._placement._next(model, self.now)) is not None:
                assert self.dispatch.registry.choose(waiting) is None

    @invariant()
    def whoever_waits_for_time_alone_is_woken(self):
        if hasattr(self, "dispatch") and self.dispatch.num_open:
            assert self.dispatch.next_tick > self.now - 1e-6

    def teardown(self):
        """Whatever has happened, it comes to an end, and nothing is left over."""
        if not hasattr(self, "dispatch"):
            return
        for _ in range(20):
            self.now += 15
            self.perform(self.dispatch.tick(self.now))
        assert self.dispatch.num_open == self.dispatch.num_queued == 0
        assert self.dispatch.next_tick is None
        assert not any(replica.running for replica in self.replicas.values()), "a replica works for nobody"
        self.dispatch.check_integrity()
        for request_id, client in self.clients.items():
            self.check(request_id, client)

    def check(self, request_id: str, client: Client) -> None:
        right = [right_token(request_id, index) for index in range(NUM_TOKENS)]
        if client.stop_at is not None:
            right = right[: right.index(client.stop_at) + 1]
        assert client.num_last_words == 1
        assert client.tokens == right[: len(client.tokens)]
        letters = "".join(chr(ord("a") + token_id) for token_id in client.tokens)
        if client.finish_reason is None:
            assert letters.startswith(client.text)
        elif client.finish_reason == "abort":
            assert client.text == letters
        else:
            assert client.tokens == right
            assert client.text == letters
            assert client.finish_reason == ("length" if client.stop_at is None else "stop")

    # --- inside ---

    def open_clients(self) -> list[str]:
        return [request_id for request_id, client in self.clients.items() if client.num_last_words == 0]

    def replica_comes(self, replica_id: str) -> None:
        self.replicas[replica_id] = Replica()
        self.perform(self.dispatch.replica_up(facts(replica_id, REPLICAS[replica_id]), load(), self.now))

    def replica_refuses(self, replica: Replica, gives_up: bool) -> None:
        attempt = next(iter(replica.running))
        if gives_up:
            replica.abort(attempt)
        else:
            del replica.running[attempt]
            replica.say(rejections=(Rejection(attempt=attempt, error=QueueFullError("full")),))

    def link_breaks(self, replica_id: str) -> None:
        """A link is lost with all that is on it; what turns up out of thin air all the same does nothing."""
        replica = self.replicas.pop(replica_id)
        self.perform(self.dispatch.replica_down(replica_id, ReplicaError("lost"), self.now))
        for news in replica.on_the_way:
            assert self.dispatch.step(replica_id, news, self.now) == []

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendSubmit():
                    assert not self.clients[action.request.request_id].is_cancelled
                    self.replicas[action.replica_id].submit(action)
                case SendAbort():
                    self.replicas[action.replica_id].abort(action.attempt)
                case OutputDelta():
                    self.deliver(self.clients[action.request_id], action)
                case Fail():
                    self.clients[action.request_id].num_last_words += 1

    def deliver(self, client: Client, delta: OutputDelta) -> None:
        assert client.num_last_words == 0, "nothing comes after the last word"
        assert delta.first_token_index == len(client.tokens), "neither gap nor overlap"
        client.tokens += delta.token_ids
        client.text += delta.text
        if delta.finish_reason is not None:
            client.num_last_words += 1
            client.finish_reason = delta.finish_reason
            assert delta.usage.num_completion_tokens == len(client.tokens)


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


def test_closing_all_ends_whatever_is_open():
    machine = DispatchMachine()
    machine.begin([0])
    for _ in range(8):
        machine.submit("m", Priority.NORMAL, 60, 12)
    machine.perform(machine.dispatch.close_all(RequestAbortedError("stopping")))
    assert machine.dispatch.num_open == 0
    machine.teardown()
