"""When a client asks again, where, and what it asks then: with scripted routers and a clock that is moved."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.retry_policy import MAX_PAUSE_S, RECONNECT_S
from holdfast.router.request import GenerationRequest
from holdfast.router.resume import ResumeRecord, SequenceRecord
from holdfast.router.wire.statuses import call_status
from holdfast.worker.errors import (
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    OnTrialError,
    QueueFullError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    VersionGoneError,
)
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from tests.cluster.client.scripted import (
    ANSWERS,
    FINGERPRINT,
    LOST_READING,
    UNREACHABLE,
    MovedClock,
    Script,
    ScriptedTransport,
    broken,
    lost_after,
    refuses,
    tokens,
)
from tests.loops import on_a_loop

PARAMS = SamplingParams(max_tokens=8, seed=1)
RIGHT = tokens(GenerationRequest(prompt="hello", sampling_params=PARAMS))


def client_of(transport: ScriptedTransport, clock: MovedClock | None = None, draw: float = 0.0) -> AsyncClient:
    return AsyncClient(["a", "b"], transport=transport, clock=clock or MovedClock(), draw=lambda: draw)


async def streamed(client: AsyncClient, params: SamplingParams = PARAMS, **options: object) -> tuple[int, ...]:
    """The tokens of the first completion."""
    chunks = [chunk async for chunk in client.stream("hello", params, **options)]
    assert len({chunk.request_id for chunk in chunks}) == 1
    return tuple(token_id for chunk in chunks if chunk.sequence_index == 0 for token_id in chunk.token_ids)


LOSSES = {
    "the connection breaks": broken(),
    "it is reset": broken("INTERNAL"),
    "it breaks in a way of its own": broken("UNKNOWN"),
    "it is cancelled on the way": broken("CANCELLED"),
    "the router has no replica left": call_status(ReplicaError("lost")),
    "the router stops": call_status(RequestAbortedError("stopping")),
}


@on_a_loop
async def test_a_stream_goes_on_at_another_router_after_what_was_received():
    for name, status in LOSSES.items():
        transport, clock = ScriptedTransport(a=lost_after(3, status), b=ANSWERS), MovedClock()
        assert await streamed(client_of(transport, clock)) == RIGHT, name
        first, second = transport.wishes
        assert (first.attempt, first.resume, second.attempt) == (1, None, 2)
        received = SequenceRecord(token_ids=list(RIGHT[:3]), text_length=3)
        assert second.resume == ResumeRecord(sequences=[received], fingerprint=FINGERPRINT)
        assert second.request_id == first.request_id != ""
        assert clock.pauses == [0.0]
        assert transport.num_open == 0


@on_a_loop
async def test_a_stream_survives_any_number_of_losses_that_are_apart():
    """Each word of a router starts the patience afresh."""
    transport, clock = ScriptedTransport(a=lost_after(1), b=lost_after(1)), MovedClock()
    params = SamplingParams(max_tokens=200, seed=1)
    right = tokens(GenerationRequest(prompt="hello", sampling_params=params))
    assert await streamed(client_of(transport, clock), params) == right
    assert [wish.attempt for wish in transport.wishes] == list(range(1, 201))
    assert not any(clock.pauses)


@on_a_loop
async def test_what_has_ended_is_not_asked_for_again():
    transport = ScriptedTransport(a=lost_after(5), b=ANSWERS)
    chunks = []
    async for chunk in client_of(transport).stream("hello", SamplingParams(max_tokens=2, seed=1, n=3)):
        chunks.append(chunk)
    ends = [progress.finish_reason for progress in transport.wishes[1].resume.sequences]
    assert ends == [FinishReason.LENGTH, FinishReason.LENGTH, None]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.sequence_index == index]
        assert [chunk.finish_reason for chunk in own] == [None, FinishReason.LENGTH]


@on_a_loop
async def test_a_submission_is_the_first_one_with_less_time():
    transport, clock = ScriptedTransport(a=[UNREACHABLE, ANSWERS], b=UNREACHABLE), MovedClock()
    options = {"tenant": "t", "priority": Priority.HIGH, "cache_salt": "s", "model": "m", "timeout_s": 9.0}
    await streamed(client_of(transport, clock, draw=0.4), **options)
    first, second, third = transport.wishes
    for wish in (second, third):
        assert (wish.tenant, wish.priority, wish.cache_salt, wish.model) == ("t", Priority.HIGH, "s", "m")
        assert (wish.request_id, wish.sampling_params) == (first.request_id, first.sampling_params)
    pause_s = clock.pauses[1]
    assert pause_s > 0
    assert (first.timeout_s, second.timeout_s) == (9.0, 9.0)
    assert third.timeout_s == pytest.approx(9.0 - pause_s, abs=1e-3)


@on_a_loop
async def test_a_chat_stays_what_it_was():
    transport = ScriptedTransport(a=lost_after(0), b=Script(num_chunks=0, status=call_status(InternalError("over"))))
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(InternalError, match="over"):
        [_ async for _ in client_of(transport).stream(None, PARAMS, messages=messages)]
    first, second = transport.wishes
    assert first.chat == second.chat
    assert first.chat.now_s > 0


@on_a_loop
async def test_a_whole_answer_is_asked_for_anew():
    transport = ScriptedTransport(a=lost_after(0), b=ANSWERS)
    answer = await client_of(transport).generate("hello", PARAMS)
    assert answer.completions[0].token_ids == RIGHT
    assert [(wish.attempt, wish.resume) for wish in transport.wishes] == [(1, None), (2, None)]


HOPELESS = [
    CallerError("no"),
    InvalidRequestError("request_id", "x", "too long"),
    UnknownModelError("m", ("n",)),
    DeadlineExceededError("late"),
    RequestSupersededError("there is a newer one"),
    RequestQuarantinedError("it kills"),
    InternalError("a bug"),
    QueueFullError("full", 2.5),
]


@pytest.mark.parametrize("error", HOPELESS, ids=lambda error: type(error).__name__)
def test_what_another_router_cannot_mend_is_raised_at_once(error: HoldfastError):
    async def ask() -> None:
        transport = ScriptedTransport(a=refuses(error), b=ANSWERS)
        for ask in (streamed(client_of(transport)), client_of(transport).generate("hello", PARAMS)):
            with pytest.raises(type(error)) as raised:
                await ask
            assert type(raised.value) is type(error)
            assert raised.value.retry_after_s == error.retry_after_s
        assert transport.calls == [("a", "GenerateStream"), ("a", "Generate")]

    asyncio.run(ask())


@on_a_loop
async def test_whoever_was_superseded_does_not_come_back():
    transport = ScriptedTransport(a=lost_after(3, call_status(RequestSupersededError("newer"))), b=ANSWERS)
    with pytest.raises(RequestSupersededError):
        await streamed(client_of(transport))
    assert len(transport.calls) == 1


@on_a_loop
async def test_a_stream_ends_with_its_version_and_a_whole_answer_begins_anew():
    gone = call_status(VersionGoneError("m", "7ad18da1", "updated"))
    with pytest.raises(VersionGoneError):
        await streamed(client_of(ScriptedTransport(a=lost_after(3, gone), b=ANSWERS)))
    transport = ScriptedTransport(a=lost_after(0, gone), b=ANSWERS)
    answer = await client_of(transport).generate("hello", PARAMS)
    assert answer.completions[0].token_ids == RIGHT


@on_a_loop
async def test_a_full_queue_is_waited_for_by_those_who_were_in_before():
    """The stream had no token yet, so it comes like a new one; but its client knows that it is not."""
    full, clock = refuses(CapacityError("full", 3.0)), MovedClock()
    transport = ScriptedTransport(a=lost_after(0), b=[full, ANSWERS])
    assert await streamed(client_of(transport, clock)) == RIGHT
    assert [address for address, _ in transport.calls] == ["a", "b", "a", "b"]
    assert clock.pauses[:2] == [0.0, 3.0 / 2]  # the router's hint, with the least jitter


@on_a_loop
async def test_nobody_there_is_said_soon_and_somebody_lost_is_waited_for():
    for script, most_s in ((UNREACHABLE, 5.0), (lost_after(0), RECONNECT_S)):
        transport, clock = ScriptedTransport(a=[script, UNREACHABLE], b=UNREACHABLE), MovedClock()
        with pytest.raises(ReplicaError, match="holdfast serve"):
            await streamed(client_of(transport, clock))
        assert most_s - MAX_PAUSE_S <= sum(clock.pauses) < most_s
        assert {address for address, _ in transport.calls} == {"a", "b"}


@on_a_loop
async def test_it_ends_with_the_time_of_the_request():
    transport, clock = ScriptedTransport(a=[lost_after(1), UNREACHABLE], b=UNREACHABLE), MovedClock()
    with pytest.raises(ReplicaError):
        await streamed(client_of(transport, clock), timeout_s=7.0)
    assert 7.0 - MAX_PAUSE_S <= sum(clock.pauses) < 7.0


@on_a_loop
async def test_routers_that_take_it_and_lose_it_are_not_asked_in_a_hurry():
    transport, clock = ScriptedTransport(a=lost_after(0), b=lost_after(0)), MovedClock()
    with pytest.raises(ReplicaError):
        await streamed(client_of(transport, clock), timeout_s=600.0)
    assert len(transport.calls) < 700


@on_a_loop
async def test_a_call_that_breaks_after_the_last_word_has_said_it():
    transport = ScriptedTransport(a=lost_after(8), b=ANSWERS)
    assert await streamed(client_of(transport)) == RIGHT
    assert len(transport.calls) == 1


@on_a_loop
async def test_what_is_asked_once_finds_the_router_that_is_left():
    transport = ScriptedTransport(a=UNREACHABLE, b=ANSWERS)
    client = client_of(transport)
    assert await client.detokenize([104, 105]) == "hi"
    await client.list_models()
    await client.get_load()
    assert [address for address, _ in transport.calls] == ["a", "b", "b", "b"]  # it stays where it was answered


@on_a_loop
async def test_clients_spread_over_the_routers():
    for draw, address in ((0.0, "a"), (0.49, "a"), (0.5, "b"), (0.99, "b")):
        transport = ScriptedTransport(a=ANSWERS, b=ANSWERS)
        await streamed(client_of(transport, draw=draw))
        assert transport.calls == [(address, "GenerateStream")]


@on_a_loop
async def test_leaving_the_iteration_ends_the_call_and_closing_the_client_the_transport():
    transport = ScriptedTransport(a=ANSWERS, b=ANSWERS)
    async with client_of(transport) as client:
        async with aclosing(client.stream("hello", PARAMS)) as chunks:
            await anext(chunks)
            assert transport.num_open == 1
        assert transport.num_open == 0
    assert transport.is_closed


@on_a_loop
async def test_a_caller_who_goes_while_a_router_is_silent_is_gone():
    transport = ScriptedTransport(a=Script(num_chunks=2, is_silent=True), b=ANSWERS)
    asking = asyncio.create_task(streamed(client_of(transport)))
    while not transport.num_open:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (transport.num_open, len(transport.calls)) == (0, 1)


@on_a_loop
async def test_an_answer_that_is_none_is_an_error():
    transport = ScriptedTransport(a=Script(num_chunks=0), b=ANSWERS)
    with pytest.raises(InternalError, match="without an answer"):
        await client_of(transport).generate("hello", PARAMS)


@on_a_loop
async def test_a_request_that_ends_routers_while_they_read_it_is_sent_twice():
    """The second time it says that it has cost one. The first router may have ended for any reason."""
    asks: list[Callable[[AsyncClient], Awaitable[object]]] = [
        streamed,
        lambda client: client.generate("hello", PARAMS),
        lambda client: client.detokenize([104]),
    ]
    for ask in asks:
        transport, clock = ScriptedTransport(a=LOST_READING, b=LOST_READING), MovedClock()
        client = client_of(transport, clock)
        with pytest.raises(RequestQuarantinedError, match="2 routers ended, one after the other, while they were read"):
            await ask(client)
        assert [address for address, _ in transport.calls] == ["a", "b"]
        assert transport.stated == [0, 1]
        assert clock.pauses == [0.0]


@on_a_loop
async def test_a_router_that_has_read_a_request_clears_it():
    """Every second router is lost while it reads the request, the others later; and others are away or refuse."""
    full = refuses(QueueFullError("another suspect is being read"))
    scripts = [LOST_READING, UNREACHABLE, full, lost_after(1), refuses(RequestAbortedError("stopping"))]
    transport = ScriptedTransport(a=scripts * 3 + [ANSWERS], b=UNREACHABLE)
    assert await streamed(client_of(transport)) == RIGHT
    of_a = [stated for (address, _), stated in zip(transport.calls, transport.stated, strict=True) if address == "a"]
    assert of_a == [0, 1, 1, 1, 0] * 3 + [0]


@on_a_loop
async def test_a_router_that_was_reading_a_request_is_waited_for_as_one_that_had_it():
    transport, clock = ScriptedTransport(a=[LOST_READING, UNREACHABLE], b=UNREACHABLE), MovedClock()
    with pytest.raises(ReplicaError):
        await streamed(client_of(transport, clock))
    assert RECONNECT_S - 5 < sum(clock.pauses) < RECONNECT_S + 1


class ChangedTransport(ScriptedTransport):
    """Changes what routers answer."""

    def __init__(self, change: Callable[[list], list]) -> None:
        super().__init__(a=ANSWERS, b=ANSWERS)
        self._change = change

    def _answers(self, method: str, request: object) -> list:
        return self._change(super()._answers(method, request))


@on_a_loop
async def test_a_lost_guarantee_stays_lost():
    def lose(answers: list) -> list:
        answers[2].replayed_without_guarantee = True
        return answers

    chunks = [chunk async for chunk in client_of(ChangedTransport(lose)).stream("hello", PARAMS)]
    assert [chunk.replayed_without_guarantee for chunk in chunks] == [False] * 2 + [True] * 6


@on_a_loop
async def test_a_gap_is_an_error_and_a_repeated_end_is_none():
    with pytest.raises(InternalError, match="does not continue where it was cut off"):
        await streamed(client_of(ChangedTransport(lambda answers: answers[:2] + answers[3:])))
    assert await streamed(client_of(ChangedTransport(lambda answers: [*answers, answers[-1]]))) == RIGHT


@on_a_loop
async def test_a_request_that_waits_for_others_to_be_read_is_not_given_up_after_the_time_to_connect():
    """Its router was lost in a way that looked from here as if it had not read it; the other one knows better."""
    waits = refuses(OnTrialError("another one is being read", 0.05))
    unread = Script(num_chunks=0, status=broken(), is_taken=False)
    for num_others, is_served in ((30, True), (500, False)):
        transport = ScriptedTransport(a=[unread, UNREACHABLE], b=[*[waits] * num_others, ANSWERS])
        clock = MovedClock()
        if is_served:
            assert await streamed(client_of(transport, clock)) == RIGHT
            assert sum(clock.pauses) > 5.0, "longer than `connect_s`"
        else:
            with pytest.raises(ReplicaError):
                await streamed(client_of(transport, clock))
            assert sum(clock.pauses) <= RECONNECT_S
