"""One client's call: its completions are opened together or not at all, take turns, and are paid for at the end."""

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stream import OutputStream, RequestStream, WakingSink
from holdfast.router.events import CaughtUp
from holdfast.router.generation import OutputDelta, Usage
from holdfast.worker.errors import QueueFullError, ReplicaError
from holdfast.worker.request import EngineRequest, FinishReason, SequenceKey
from holdfast.worker.sampling_params import SamplingParams
from tests.router.answers import read_from
from tests.router.core import LetterText, delta
from tests.router.dispatch.test_dispatch_host import Board


def asked(index: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id="r", sequence_index=index, prompt_token_ids=(1, 2), sampling_params=SamplingParams(seed=0)
    )


def parts(*indices: int, **fields) -> list[RequestState]:
    return [
        RequestState(request=asked(index), model="m", text=LetterText(), deadline=200.0, **fields) for index in indices
    ]


def opened(dispatch_host: DispatchHost, *siblings: RequestState, echo: str = "") -> RequestStream:
    call = RequestStream(siblings[0].request)
    call.open(dispatch_host, siblings, WakingSink(lambda: None), echo=echo)
    return call


def test_siblings_speak_as_their_request_and_the_last_one_tells_what_all_cost():
    board = Board()
    call = opened(board.dispatch_host, *parts(0, 1), echo="> ")
    x, y = board.port.attempts
    board.news(delta(y, 0, 3, 9, finish=FinishReason.STOP))  # what ends it is no text
    board.news(delta(x, 0, 1, 2, finish=FinishReason.LENGTH))
    first, second = call.poll(), call.poll()
    assert {first.request_id, second.request_id} == {"r"}
    assert (first.sequence_index, first.text, first.usage) == (0, "> bc", None)
    assert (second.sequence_index, second.text, second.finish_reason) == (1, "> d", FinishReason.STOP)
    assert second.usage == call.usage == Usage(num_prompt_tokens=2, num_completion_tokens=4)
    assert call.is_over
    assert call.poll() is None
    board.dispatch_host.check_integrity()


def test_a_completion_that_says_much_does_not_keep_the_others_waiting():
    streams = [OutputStream(SequenceKey("", "r", 0, index), WakingSink(lambda: None)) for index in range(3)]
    for index, stream in enumerate(streams):
        stream.index = index
    call, order = RequestStream(asked()), []
    read_from(call, streams)
    for step in range(6):
        for stream in streams:
            stream.push(OutputDelta(request_id="r", first_token_index=step, token_ids=(5,), text=""))
        order.append(call.poll().sequence_index)
    assert order == [0, 1, 2, 0, 1, 2]


def test_siblings_that_cannot_all_be_opened_leave_nothing_open():
    board = Board(RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=1))
    with pytest.raises(QueueFullError):
        opened(board.dispatch_host, *parts(0, 1, 2))
    assert board.dispatch_host.dispatch.num_open == 0
    assert board.port.aborted == board.port.attempts
    board.dispatch_host.check_integrity()


def test_closing_cancels_what_has_not_ended():
    board = Board()
    call = opened(board.dispatch_host, *parts(0, 1))
    x, y = board.port.attempts
    board.news(delta(x, 0, 3, finish=FinishReason.STOP))
    call.close()
    assert board.port.aborted == [y]
    assert board.dispatch_host.dispatch.num_open == 0


def test_what_ends_one_completion_with_an_error_is_raised():
    board = Board()
    call = opened(board.dispatch_host, *parts(0, 1))
    board.dispatch_host.close_all(ReplicaError("lost"))
    with pytest.raises(ReplicaError, match="lost"):
        call.poll()


def test_a_completion_that_its_client_has_to_the_end_is_not_drawn_again():
    board = Board()
    call = opened(board.dispatch_host, *parts(0, caught_up=CaughtUp(finish_reason=FinishReason.STOP)), *parts(1))
    assert len(board.port.attempts) == 1
    end = call.poll()
    assert (end.sequence_index, end.token_ids, end.finish_reason) == (0, (), FinishReason.STOP)
    assert not call.is_over
