"""The table of a request's states: all of it can be reached, what is not in it is refused, and its picture is true."""

import pytest

from holdfast.router.dispatch import request_status
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import TRANSITIONS, RequestEvent, RequestStatus
from holdfast.worker.errors import InternalError
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from tests.router.core import LetterText

OVER = {RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED, RequestStatus.HANDED_OVER}
ENDS = {RequestEvent.FAIL, RequestEvent.CANCEL, RequestEvent.HAND_OVER}


def a_request(status: RequestStatus) -> RequestState:
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=1))
    state = RequestState(request=request, model="m", text=LetterText())
    state.status = status
    return state


@pytest.mark.parametrize("status", RequestStatus)
def test_every_event_in_every_state_is_listed_or_refused(status):
    for event in RequestEvent:
        state = a_request(status)
        if event in TRANSITIONS[status]:
            state.note(event)
            assert state.status is TRANSITIONS[status][event]
        else:
            with pytest.raises(InternalError, match=f"x is {status.value}: '{event.value}' cannot happen"):
                state.note(event)
            assert state.status is status


def test_every_state_can_be_reached():
    reached, new = set(), {RequestStatus.QUEUED}
    while new:
        reached |= new
        new = {after for status in new for after in TRANSITIONS[status].values()} - reached
    assert reached == set(RequestStatus)


def test_a_request_waits_or_has_an_attempt_until_it_is_over():
    for status in RequestStatus:
        is_suspended = status is RequestStatus.SUSPENDED
        assert [status.is_waiting, status.has_attempt, is_suspended, status in OVER].count(True) == 1
        assert TRANSITIONS[status].keys() >= ENDS or status in OVER
        assert not (status in OVER and TRANSITIONS[status])


def test_the_picture_shows_the_table():
    lines = request_status.__doc__.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == ["SEND"])
    header = lines[start]
    starts = [header.index(name) for name in header.split()]
    columns = list(zip(header.split(), starts, [*starts[1:], None], strict=True))
    shown = {}
    for line in lines[start + 1 : start + 9]:
        status = RequestStatus[line.split()[0]]
        cells = [(RequestEvent[name], line[start:end].split()) for name, start, end in columns]
        shown[status] = {event: RequestStatus[words[0]] for event, words in cells if words}
    for status in set(RequestStatus) - OVER:
        assert shown.pop(status) == {event: to for event, to in TRANSITIONS[status].items() if event not in ENDS}
    assert not shown
