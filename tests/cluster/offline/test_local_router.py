"""The router in one process, over an engine that says what a test wants: answers find those who wait for them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from holdfast.cluster.offline.local_router import LocalRouter
from holdfast.cluster.offline.request_handle import Callback, RequestHandle
from holdfast.router.config import LimitsConfig
from holdfast.router.request import GenerationRequest
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import DeadlineExceededError, InternalError, ReplicaError, RequestAbortedError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import Rejection, StepListener, StepUpdate
from tests.fakes import byte_tokenizer

LOAD = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=9, num_total_blocks=9)
INFO = ModelInfo(
    model="m",
    path="/nowhere",
    model_type="m",
    max_model_len=100,
    vocab_size=256,
    eos_token_ids=frozenset(),
    dtype="float32",
    tensor_parallel_size=1,
    block_size=4,
    num_blocks=100,
    kv_bytes_per_token=8,
    row_invariant=True,
)


@dataclass
class FakeEngine:
    """Remembers what it is asked, and says what a test gives it."""

    submitted: list[EngineRequest] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    load = LOAD

    def attach(self, listener: StepListener) -> None:
        self.listener = listener

    def submit(self, request: EngineRequest, listener: StepListener, attempt: int) -> None:
        self.submitted.append(request)
        self.attempts.append(attempt)

    def abort(self, attempt: int) -> None:
        self.aborted.append(attempt)

    def say(self, number: int, first: int, text: str, finish: FinishReason | None = None) -> None:
        """What a step did for the request that was submitted as number `number`."""
        attempt = self.attempts[number]
        delta = TokenDelta(
            attempt=attempt, first_token_index=first, token_ids=tuple(text.encode()), finish_reason=finish
        )
        self.listener.on_update(StepUpdate(step_id=1, deltas=(delta,), load=LOAD))

    def reject(self, attempt: int) -> None:
        rejection = Rejection(attempt=attempt, error=DeadlineExceededError("too late"))
        self.listener.on_update(StepUpdate(step_id=1, rejections=(rejection,), load=LOAD))


@dataclass
class Place:
    engine: FakeEngine
    router: LocalRouter

    def submitted(self, name: str, callback: Callback | None = None, **params) -> RequestHandle:
        wish = GenerationRequest(prompt="hi", request_id=name, sampling_params=SamplingParams(**{"seed": 1, **params}))
        request = RequestHandle(
            wish, byte_tokenizer(), self.router.cancel, callback, name=wish.request_id, is_awaited=True
        )
        self.router.submit(request)
        return request

    def opened(self, name: str, callback: Callback | None = None, **params) -> RequestHandle:
        request = self.submitted(name, callback, **params)
        request.admitted.result(30)
        return request

    @contextmanager
    def busy_loop(self) -> Iterator[None]:
        """The event loop stands still."""
        gate = threading.Event()
        self.router._loop.call_soon_threadsafe(gate.wait, 30)
        try:
            yield
        finally:
            gate.set()


@pytest.fixture
def place(monkeypatch) -> Iterator[Place]:
    monkeypatch.setattr(Tokenizer, "load", byte_tokenizer)
    engine = FakeEngine()
    router = LocalRouter.start(SimpleNamespace(engine=engine, info=INFO), LimitsConfig(), max_waiting=9)
    yield Place(engine, router)
    router.end_all()
    router.close()


def test_a_callback_sees_every_step_also_of_those_that_come_at_once(place):
    seen = []
    request = place.opened("a", lambda output: seen.append((output.outputs[0].text, output.finished)))
    with place.busy_loop():
        for index, letter in enumerate("abcd"):
            place.engine.say(0, index, letter)
        place.engine.say(0, 4, "e", FinishReason.LENGTH)
    assert request.future.result(30).outputs[0].text == "abcde"
    assert seen == [("a", False), ("ab", False), ("abc", False), ("abcd", False), ("abcde", True)]


def test_a_rejection_after_a_stop_string_harms_nobody(place):
    stopped, other = place.opened("a", stop="."), place.opened("b")
    place.engine.say(0, 0, "x.")
    assert stopped.future.result(30).outputs[0].finish_reason == "stop"
    assert place.engine.aborted == [place.engine.attempts[0]]
    place.engine.reject(place.engine.attempts[0])
    place.engine.listener.on_failure(ReplicaError("the end"))
    with pytest.raises(ReplicaError, match="the end"):
        other.future.result(30)


def test_an_engine_that_ends_answers_all_and_those_who_come_later(place):
    error = ReplicaError("on fire")
    requests = [place.opened(str(number)) for number in range(3)]
    with place.busy_loop():
        place.engine.listener.on_failure(error)
        requests.append(place.submitted("late"))
    for request in requests:
        assert request.future.exception(30) is error
    with pytest.raises(ReplicaError, match="on fire"):
        place.submitted("later still")


def test_requests_that_have_hardly_begun_can_be_cancelled(place):
    with place.busy_loop():
        request = place.submitted("a", n=2)
        place.router.cancel(request)
    output = request.future.result(30)
    assert [(one.index, one.token_ids, one.finish_reason) for one in output.outputs] == [
        (0, [], "abort"),
        (1, [], "abort"),
    ]
    assert request.admitted.done()


def test_what_was_said_and_not_read_is_told_to_those_who_cancel(place):
    request = place.opened("a")
    place.engine.say(0, 0, "some")
    place.engine.say(0, 4, " text")
    place.router.abort("a")
    output = request.future.result(30).outputs[0]
    assert (output.text, output.finish_reason) == ("some text", "abort")
    assert place.engine.aborted == [place.engine.attempts[0]]


def test_the_end_answers_those_who_have_just_come(place):
    with place.busy_loop():
        requests = [place.submitted(str(number)) for number in range(3)]
        ending = threading.Thread(target=place.router.end_all)
        ending.start()
    ending.join(30)
    assert {request.future.result(0).outputs[0].finish_reason for request in requests} == {"abort"}
    with pytest.raises(RequestAbortedError):
        place.submitted("late")


def test_a_fault_of_ours_ends_one_request_and_no_other(place, caplog, monkeypatch):
    broken, other = place.opened("a"), place.opened("b")
    monkeypatch.setattr(broken._answer, "read", lambda: 1 // 0)
    for number in (0, 1):
        place.engine.say(number, 0, "x", FinishReason.LENGTH)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        broken.future.result(30)
    assert other.future.result(30).outputs[0].text == "x"


def test_the_text_goes_on_from_the_prompt(place):
    """The prompt ends within a character that the output ends."""
    wish = GenerationRequest(prompt=(ord("h"), 0xC3), request_id="a", sampling_params=SamplingParams(seed=1))
    request = RequestHandle(wish, byte_tokenizer(), place.router.cancel, name=wish.request_id, is_awaited=True)
    place.router.submit(request)
    request.admitted.result(30)
    with place.busy_loop():
        delta = TokenDelta(
            attempt=place.engine.attempts[0],
            first_token_index=0,
            token_ids=(0xA9,),
            finish_reason=FinishReason.LENGTH,
        )
        place.engine.listener.on_update(StepUpdate(step_id=1, deltas=(delta,), load=LOAD))
    assert request.future.result(30).outputs[0].text == "\u00e9"
