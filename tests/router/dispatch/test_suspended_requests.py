"""Requests whose clients do not read: no replica runs them meanwhile, and then they go on, token for token."""

from collections.abc import Callable

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.failures import Quarantine
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestStatus
from holdfast.router.dispatch.request_stream import BEHIND_AT_LEAST_S, OutputStream, WakingSink
from holdfast.router.dispatch.timeline import Cause
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.errors import ByteBudgetError, DeadlineExceededError, ReplicaError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, EngineLoad, EngineRequest, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import PlainTokens, StepUpdate
from tests.router.core import Core, LetterText, aborts, delivered, delta, facts, failure, load, sent, two_replicas

# --- the core ---


@pytest.fixture
def core() -> Core:
    made = Core(RouterConfig(max_waiting_per_replica=1))
    made.up("r")
    return made


def suspend(core: Core, request_id: str) -> list:
    return core._checked(core.dispatch.suspend(core.key(request_id), core.now))


def go_on(core: Core, request_id: str) -> list:
    return core._checked(core.dispatch.go_on(core.key(request_id), core.now))


def test_a_suspended_request_leaves_its_replica_to_others_and_goes_on_after_its_output(core):
    first = sent(core.submit("slow"))
    core.step(delta(first.attempt, 0, 0, 1), load=load(num_waiting=1))
    assert core.submit("next") == []
    core.step(load=load(num_waiting=1))
    actions = suspend(core, "slow")
    assert aborts(actions) == [("r", first.attempt)]
    core.step(load=load())
    assert core.dispatch.num_suspended == 1
    assert core.dispatch.num_queued == 0, "the next one runs"
    assert not core.dispatch.waiting()
    assert core.step(delta(first.attempt, 2, 2), load=load()) == [], "what was on its way is dropped"
    again = sent(go_on(core, "slow"))
    assert again.request.output_token_ids == (0, 1)
    last = delivered(core.step(delta(again.attempt, 2, 2, finish=FinishReason.LENGTH)))
    assert (last.first_token_index, last.token_ids, last.text) == (2, (2,), "bc")
    assert core.dispatch.stats.suspended == {"m": 1}
    assert not core.dispatch.stats.failovers, "no replica has failed it"
    assert not core.dispatch.stats.pause_s


@pytest.mark.parametrize("end_is_reported", [False, True])
def test_a_crash_counts_against_a_request_until_the_replica_reports_its_abort(end_is_reported):
    core = Core()
    core.up("r")
    first = sent(core.submit("slow"))
    core.step(delta(first.attempt, 0, 0))
    suspend(core, "slow")
    if end_is_reported:
        core.step(delta(first.attempt, 1, finish=FinishReason.ABORT))
    assert core.dispatch.num_withdrawn == (0 if end_is_reported else 1)
    state = core.dispatch._requests[core.key("slow")]
    core.down("r")
    assert state.num_replicas_lost == state.num_replicas_lost_in_a_row == (0 if end_is_reported else 1)
    assert core.dispatch.num_withdrawn == 0


def test_planted_a_crash_that_does_not_count_against_withdrawn_attempts_is_found(monkeypatch):
    monkeypatch.setattr(Quarantine, "count_withdrawn", lambda self, states, replica, now: None)
    with pytest.raises(AssertionError):
        test_a_crash_counts_against_a_request_until_the_replica_reports_its_abort(end_is_reported=False)


def test_a_request_that_goes_on_elsewhere_is_cleared_of_the_crash_of_the_replica_it_left():
    core = Core()
    core.up("r")
    first = sent(core.submit("slow"))
    core.step(delta(first.attempt, 0, 0))
    suspend(core, "slow")
    core.dispatch.replica_retiring("r", True, core.now)
    core.up("s")
    second = sent(go_on(core, "slow"))
    core.dispatch.replica_retiring("r", False, core.now)
    for index in range(1, NUM_STEPS_TO_CLEAR + 1):
        core.step(delta(second.attempt, index, index), replica_id="s")
    core.down("r")
    assert core.dispatch._requests[core.key("slow")].num_replicas_lost == 0


ENDS: dict[str, Callable[[Core], list]] = {
    "cancelled": lambda core: core.cancel("x"),
    "aborted": lambda core: core.abort("x"),
    "submitted again": lambda core: core.supersede("x"),
    "out of time": lambda core: core.tick(61.0),
    "failed": lambda core: core._checked(core.dispatch.fail(core.key("x"), ByteBudgetError("greedy"), core.now)),
    "closed": lambda core: core._checked(core.dispatch.close_all(ReplicaError("stopping"))),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_suspended_request_ends_as_any_other(core, end):
    first = sent(core.submit("x"))
    core.step(delta(first.attempt, 0, 0))
    suspend(core, "x")
    actions = end(core)
    assert core.dispatch.num_open == core.dispatch.num_suspended == 0
    assert not aborts(actions), "no replica has it"
    assert core.dispatch.next_tick is None


def test_time_that_is_up_is_told_with_what_it_was_spent_on(core):
    core.step(delta(sent(core.submit("x")).attempt, 0, 0))
    suspend(core, "x")
    assert "waited for its client to read, after 1 output" in str(failure(core.tick(61.0)).error)


def test_the_loss_of_its_replica_is_nothing_to_a_suspended_request():
    core = two_replicas()
    first = sent(core.submit("x"))
    core.step(delta(first.attempt, 0, 0), replica_id=first.replica_id)
    suspend(core, "x")
    core.step(delta(first.attempt, 1, finish=FinishReason.ABORT), replica_id=first.replica_id)
    assert core.down(first.replica_id) == []
    assert sent(go_on(core, "x")).request.output_token_ids == (0,)
    state = core.dispatch._requests[core.key("x")]
    assert (state.num_replicas_lost, state.timeline.num_failovers) == (0, 0)
    assert [one.cause for one in state.timeline.attempts] == [Cause.UNREAD, None]


def test_what_waits_or_is_on_trial_is_not_suspended():
    core = Core(RouterConfig(max_replicas_lost=1))
    core.up("a")
    assert suspend(core, "nobody") == []
    core.submit("x")
    core.down("a")
    assert core.dispatch._requests[core.key("x")].status.is_waiting
    assert suspend(core, "x") == []
    assert go_on(core, "x") == []
    core.up("b")
    state = core.dispatch._requests[core.key("x")]
    if state.status is RequestStatus.ON_TRIAL:
        assert suspend(core, "x") == []
        assert state.status is RequestStatus.ON_TRIAL


# --- streams, and a replica with slots ---

STEP_S = 0.02
MAX_UNREAD = 16


def right_token(request_id: str, index: int) -> int:
    return (sum(request_id.encode()) + 7 * index) % 26


class Clock:
    """Moved by hand. Its alarms never ring: no deadline is near."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> "Clock":
        return self

    def cancel(self) -> None:
        pass


class SlotReplica:
    """Runs `num_slots` attempts at a time, a token for each at every step; the others wait in the order of arrival."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.attempts: dict[int, tuple[EngineRequest, int]] = {}
        self.num_tokens = 0

    def submit(self, action: SendSubmit) -> None:
        self.attempts[action.attempt] = action.request, len(action.request.output_token_ids)

    def abort(self, action: SendAbort) -> None:
        self.attempts.pop(action.attempt, None)

    def take_pins(self, action) -> None: ...

    @property
    def load(self) -> EngineLoad:
        num_running = min(self.num_slots, len(self.attempts))
        return load(num_running, len(self.attempts) - num_running)

    def step(self) -> StepUpdate:
        deltas = []
        for attempt, (request, done) in list(self.attempts.items())[: self.num_slots]:
            token_id = right_token(request.request_id, done)
            is_last = done + 1 == request.sampling_params.max_tokens
            reason = FinishReason.LENGTH if is_last else None
            deltas.append(
                TokenDelta(attempt=attempt, first_token_index=done, token_ids=(token_id,), finish_reason=reason)
            )
            self.attempts[attempt] = request, done + 1
            self.num_tokens += 1
            if is_last:
                del self.attempts[attempt]
        plain, others = PlainTokens.split(deltas)
        return StepUpdate(load=self.load, plain=plain, deltas=others)


class Site:
    """A dispatch host with one such replica, in virtual time."""

    def __init__(self, num_slots: int = 4, max_unread_tokens: int | None = MAX_UNREAD) -> None:
        self.clock = Clock()
        config, limits = RouterConfig(max_waiting_per_replica=num_slots), LimitsConfig()
        self.host = DispatchHost(
            Dispatch(config, limits, lambda n: 0), self.clock, lambda: None, max_unread_tokens=max_unread_tokens
        )
        self.replica = SlotReplica(num_slots)
        self.host.replica_up(self.replica, facts("r"), self.replica.load)
        self.read: dict[str, list[int]] = {}

    def open(self, request_id: str, num_tokens: int, tenant: str = "", timeout_s: float = 10**6) -> OutputStream:
        params = SamplingParams(seed=0, max_tokens=num_tokens)
        request = EngineRequest(request_id=request_id, prompt_token_ids=(1,), sampling_params=params, tenant=tenant)
        deadline = self.host.now() + timeout_s
        state = RequestState(request=request, model="m", text=LetterText(), deadline=deadline)
        return self.host.open(state, WakingSink(lambda: None))

    def step(self, *readers: OutputStream) -> None:
        """One step of the replica; then these read what they have."""
        self.clock.now += STEP_S
        self.host.replica_update("r", self.replica.step())
        for stream in readers:
            self.poll(stream)

    def poll(self, stream: OutputStream) -> None:
        while (delta := stream.poll()) is not None:
            tokens = self.read.setdefault(stream.key.request_id, [])
            assert delta.first_token_index == len(tokens), "neither gap nor overlap"
            tokens += delta.token_ids


NUM_TOKENS = 400


def until_suspended(place: Site, stream: OutputStream, *readers: OutputStream) -> None:
    for _ in range(round(2 * BEHIND_AT_LEAST_S / STEP_S) + MAX_UNREAD):
        place.step(*readers)
        place.host.check_integrity()
        if stream.is_suspended:
            return
    raise AssertionError("it was never suspended")


def until_over(place: Site, *readers: OutputStream) -> None:
    for _ in range(2 * NUM_TOKENS):
        place.step(*readers)
        if not place.host.dispatch.num_open:
            return
    raise AssertionError("it never ended")


def test_a_stream_that_is_not_read_is_suspended_and_read_whole_in_the_end():
    place = Site()
    quick, slow = place.open("quick", NUM_TOKENS), place.open("slow", NUM_TOKENS)
    until_suspended(place, slow, quick)
    num_unread, attempts = slow.num_unread, set(place.replica.attempts)
    assert MAX_UNREAD <= num_unread <= BEHIND_AT_LEAST_S / STEP_S + MAX_UNREAD
    assert len(attempts) == 1, "the replica has the other one alone"
    for _ in range(100):
        place.step(quick)
        place.host.check_integrity()
    assert slow.num_unread == num_unread
    place.poll(slow)
    assert (slow.num_unread, slow.is_suspended) == (0, False)
    until_over(place, quick, slow)
    for request_id in ("quick", "slow"):
        assert place.read[request_id] == [right_token(request_id, index) for index in range(NUM_TOKENS)]
    assert place.host.dispatch.stats.suspended == {"m": 1}


def test_a_reader_that_keeps_up_or_falls_behind_for_a_moment_is_left_alone():
    place = Site()
    stream = place.open("x", NUM_TOKENS)
    while place.host.dispatch.num_open:
        for _ in range(MAX_UNREAD + 2):  # 0.4 s without a look
            place.step()
        place.poll(stream)
    assert not place.host.dispatch.stats.suspended
    assert len(place.read["x"]) == NUM_TOKENS


def test_a_reader_that_waits_for_the_end_is_not_slow():
    place = Site()
    stream = place.open("x", NUM_TOKENS)
    stream.notifies_each_step = False
    until_over(place)
    assert not place.host.dispatch.stats.suspended


def test_without_a_limit_nothing_is_suspended():
    place = Site(max_unread_tokens=None)
    place.open("x", NUM_TOKENS)
    until_over(place)
    assert place.replica.num_tokens == NUM_TOKENS


def test_a_suspended_stream_that_fails_tells_its_reader_after_what_there_was():
    place = Site()
    stream = place.open("x", NUM_TOKENS)
    until_suspended(place, stream)
    assert place.host.fail(stream, ByteBudgetError("greedy"))
    assert not place.host.fail(stream, ByteBudgetError("greedy"))
    with pytest.raises(ByteBudgetError):
        place.poll(stream)
    assert len(place.read["x"]) >= MAX_UNREAD
    assert place.host.dispatch.num_open == 0


def test_a_deadline_ends_a_suspended_stream():
    place = Site()
    stream = place.open("x", NUM_TOKENS, timeout_s=60.0)
    until_suspended(place, stream)
    place.clock.now += 60.0
    place.host._tick()
    with pytest.raises(DeadlineExceededError, match="for its client to read"):
        place.poll(stream)


NUM_SILENT, LONG, NUM_SLOTS, FEW_UNREAD = 300, 600, 64, 64


def first_token_after_s(max_unread_tokens: int | None) -> float:
    """How long a request waits for its first token behind 300 clients of another tenant that read nothing."""
    place = Site(NUM_SLOTS, max_unread_tokens)
    for number in range(NUM_SILENT):
        place.open(f"silent {number}", LONG, tenant="silent")
    for _ in range(10):
        place.step()
    asked_s = place.clock.now
    stream = place.open("next", 1, tenant="other")
    while not stream.num_tokens:
        place.step()
    return place.clock.now - asked_s


def test_clients_that_read_nothing_do_not_hold_the_slots_of_those_that_do():
    unlimited_s, limited_s = first_token_after_s(None), first_token_after_s(FEW_UNREAD)
    assert unlimited_s > 2 * LONG * STEP_S - 1, "the slots are held to the end, twice over"
    assert limited_s < 3 * FEW_UNREAD * STEP_S
