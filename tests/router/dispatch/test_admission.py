"""The router's queue: the order of service, the bound, and the estimate of when to come back."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.dispatch.admission import MAX_RETRY_S, MIN_RETRY_S, AdmissionQueue
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.sampling_params import SamplingParams
from tests.router.core import LetterText

NUMBERS = count()


def a_queue(max_queued: int = 10, aging_s: float = 1000.0, **shares: float) -> AdmissionQueue:
    return AdmissionQueue(max_queued, ServiceOrderConfig(aging_s=aging_s, tenant_shares=shares))


def a_request(
    name: str,
    model: str = "m",
    priority: Priority = Priority.NORMAL,
    *,
    tenant: str = "",
    due_s: float = 600.0,
    output: tuple[int, ...] = (),
    status: RequestStatus = RequestStatus.QUEUED,
) -> RequestState:
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(seed=1),
        priority=priority,
        output_token_ids=output,
        tenant=tenant,
    )
    state = RequestState(request=request, model=model, text=LetterText(), urgency=(due_s, next(NUMBERS)))
    state.status = status
    return state


def push(queue: AdmissionQueue, *args: object, now: float = 0.0, **fields: object) -> RequestState:
    state = a_request(*args, **fields)
    queue.push(state, now)
    return state


def drained(queue: AdmissionQueue, model: str = "m") -> list[str]:
    order = []
    while queue.first(model) is not None:
        order.append(popped(queue, model))
    return order


def popped(queue: AdmissionQueue, model: str = "m", now: float = 0.0, num_tokens: int = 0) -> str:
    state = queue.first(model)
    queue.pop(state, now)
    state.tenant.charge(num_tokens, 0)
    return state.request_id


def test_priority_goes_before_arrival():
    queue = a_queue()
    push(queue, "first")
    push(queue, "second")
    push(queue, "low", priority=Priority.LOW)
    push(queue, "critical", priority=Priority.CRITICAL)
    assert drained(queue) == ["critical", "first", "second", "low"]


def test_whoever_is_due_sooner_goes_before_whoever_came_sooner():
    queue = a_queue()
    push(queue, "patient")
    push(queue, "urgent", due_s=5.0)
    assert drained(queue) == ["urgent", "patient"]


def test_tenants_take_turns_by_their_shares():
    queue = a_queue(100, gold=2.0)
    for index in range(12):
        push(queue, f"free {index}", tenant="free")
    for index in range(12):
        push(queue, f"gold {index}", tenant="gold")
    served = [popped(queue, num_tokens=4).split()[0] for _ in range(12)]
    assert (served.count("gold"), served.count("free")) == (8, 4)


def test_what_need_not_wait_earns_its_tenant_no_debt_and_no_credit():
    queue = a_queue(100)
    for _ in range(50):
        for tenant, num_tokens in (("busy", 100), ("rare", 1)):
            state = a_request("x", tenant=tenant)
            queue.charge_at_once(state)
            state.tenant.charge(num_tokens, 0)
    for index in range(6):
        push(queue, f"rare {index}", tenant="rare")
        push(queue, f"busy {index}", tenant="busy")
    served = [popped(queue, num_tokens=100).split()[0] for _ in range(6)]
    assert served.count("busy") >= 2


def test_whoever_waits_long_enough_goes_before_a_stream_of_better_ones():
    queue = a_queue(100, aging_s=10.0)
    push(queue, "low", priority=Priority.LOW)
    served = []
    for now in range(0, 60, 2):
        push(queue, f"critical {now}", priority=Priority.CRITICAL, now=now, due_s=now + 600.0)
        queue.advance("m", now)
        queue.check_integrity()
        served.append(popped(queue, now=now))
        if served[-1] == "low":
            break
    assert 30 <= now < 40


def test_models_do_not_hold_each_other_up():
    queue = a_queue()
    push(queue, "a1", "a", Priority.CRITICAL)
    push(queue, "b1", "b", Priority.LOW)
    assert popped(queue, "b") == "b1"
    assert queue.has_any("a")
    assert not queue.has_any("b")


def test_a_full_queue_refuses_and_says_when_to_come_back():
    queue = a_queue(1)
    push(queue, "x")
    with pytest.raises(QueueFullError, match="max_queued") as refused:
        push(queue, "y", priority=Priority.CRITICAL)
    assert refused.value.retry_after_s == 1.0
    assert [state.request_id for state in queue.waiting("m")] == ["x"]


def test_one_tenant_cannot_fill_the_queue_for_the_others():
    queue = a_queue(10)
    for index in range(10):
        push(queue, f"flood {index}", tenant="flood")
    with pytest.raises(QueueFullError, match="10 requests wait for a replica already, 10 of them this tenant's"):
        push(queue, "flood", tenant="flood")
    for index in range(5):
        push(queue, f"other {index}", tenant="other")
    with pytest.raises(QueueFullError):
        push(queue, "other", tenant="other")
    for _ in range(6):
        popped(queue)
    push(queue, "there is room again", tenant="flood")
    queue.check_integrity()


def test_a_share_of_a_full_queue_is_that_of_the_tenants_that_wait():
    queue = a_queue(10, gold=4.0)
    for index in range(10):
        push(queue, f"free {index}", tenant="free")
    for index in range(8):
        push(queue, f"gold {index}", tenant="gold")
    with pytest.raises(QueueFullError):
        push(queue, "gold", tenant="gold")
    push(queue, "third 0", tenant="third")
    push(queue, "third 1", tenant="third")
    with pytest.raises(QueueFullError):
        push(queue, "twice the bound", tenant="fourth")
    queue.check_integrity()


def test_a_tenant_that_waits_for_one_model_has_no_share_left_for_another():
    queue = a_queue(4)
    for model in ("a", "b"):
        push(queue, f"{model} one", model, tenant="one")
        push(queue, f"{model} other", model, tenant="other")
    for tenant in ("one", "other"):
        with pytest.raises(QueueFullError):
            push(queue, "more", "b", tenant=tenant)
    push(queue, "third", "b", tenant="third")


def test_a_queue_without_places_takes_nobody():
    with pytest.raises(QueueFullError):
        push(a_queue(0), "x")


def test_the_estimate_follows_the_pace_of_departures():
    queue = a_queue(100)
    for index in range(41):
        push(queue, str(index))
    for index in range(21):
        popped(queue, now=0.5 * index)
    assert queue.retry_after_s("m") == pytest.approx(0.5 * 20 / 2)


def test_an_idle_time_does_not_count_as_a_slow_pace():
    queue = a_queue(100)
    for start in (0.0, 1000.0):
        push(queue, "a", now=start)
        push(queue, "b", now=start)
        popped(queue, now=start)
        popped(queue, now=start + 2.0)
    for index in range(4):
        push(queue, str(index))
    assert queue.retry_after_s("m") == pytest.approx(2.0 * 4 / 2)


def test_the_estimate_is_bounded():
    queue = a_queue(10_000)
    for index in range(1002):
        push(queue, str(index))
    popped(queue, now=0.0)
    popped(queue, now=100.0)
    assert queue.retry_after_s("m") == MAX_RETRY_S
    drained(queue)
    assert queue.retry_after_s("m") == MIN_RETRY_S


def test_what_comes_back_goes_first_in_its_class_whatever_the_bound_and_its_tenants_account():
    queue = a_queue(1)
    push(queue, "new", tenant="light")
    for name, status in (("back", RequestStatus.RETURNED), ("back too", RequestStatus.RETRYING)):
        queue.put_back(a_request(name, tenant="heavy", status=status), 0.0)
    queue.first("m").tenant.charge(1000, 1000)
    queue.put_back(a_request("low", priority=Priority.LOW, status=RequestStatus.RETRYING), 0.0)
    queue.check_integrity()
    with pytest.raises(QueueFullError):
        push(queue, "critical", priority=Priority.CRITICAL)
    push(queue, "resumed", tenant="heavy", output=(1,))
    assert drained(queue) == ["back", "back too", "resumed", "new", "low"]


def test_what_is_held_leaves_only_by_name():
    queue = a_queue(1)
    held = a_request("x", status=RequestStatus.ON_TRIAL)
    held.note(RequestEvent.LOSE)
    queue.put_back(held, 0.0)
    assert queue.first("m") is None
    assert queue.first_held("m") is held
    assert list(queue.waiting("m")) == [held]
    assert queue.has_any("m")
    queue.check_integrity()
    queue.remove(held)
    assert queue.num_waiting == 0
    assert not queue.has_any("m")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.sampled_from("ab"), st.sampled_from(Priority)))
)
def test_any_order_of_operations_keeps_order_and_books(operations):
    queue, waiting, number = a_queue(5), [], 0
    for operation, model, priority in operations:
        mine = sorted((entry for entry in waiting if entry[0] == model), key=lambda entry: entry[1:3])
        if operation == "push" and len(waiting) < 5:
            number += 1
            waiting.append((model, priority, number, push(queue, str(number), model, priority)))
        elif operation == "pop" and mine:
            assert popped(queue, model, now=float(number)) == str(mine[0][2])
            waiting.remove(mine[0])
        elif operation == "remove" and mine:
            queue.remove(mine[-1][3])
            waiting.remove(mine[-1])
        queue.check_integrity()
        assert queue.num_waiting == len(waiting)
        mine = sorted((entry for entry in waiting if entry[0] == model), key=lambda entry: entry[1:3])
        assert list(queue.waiting(model)) == [entry[3] for entry in mine]
