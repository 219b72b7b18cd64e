import pytest

from holdfast.cluster.client.retry_policy import MAX_PAUSE_S, RetryPolicy
from holdfast.router.dispatch.circuit_breaker import FIRST_PAUSE_S
from holdfast.worker.errors import RequestQuarantinedError


def retry_policy(num_routers: int = 1, timeout_s: float | None = None, draw: float = 1.0) -> RetryPolicy:
    return RetryPolicy(
        num_routers=num_routers, connect_s=5.0, reconnect_s=60.0, timeout_s=timeout_s, draw=lambda: draw, now=0.0
    )


def test_every_router_is_asked_before_the_first_pause():
    asked = retry_policy(num_routers=3)
    assert [asked.pause_s(0.0) for _ in range(4)] == [0.0, 0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]


def test_pauses_grow_to_a_limit_and_have_jitter():
    assert [retry_policy(draw=draw).pause_s(0.0) for draw in (0.0, 1.0)] == [FIRST_PAUSE_S / 2, FIRST_PAUSE_S]
    asked = retry_policy()
    assert [asked.pause_s(0.0) for _ in range(20)][-1] == MAX_PAUSE_S


def test_a_hint_of_the_router_counts_once_all_were_asked():
    asked = retry_policy(num_routers=2)
    assert [asked.pause_s(0.0, 3.0), asked.pause_s(0.0, 3.0)] == [0.0, 3.0]


@pytest.mark.parametrize(("is_taken", "timeout_s", "lasts_s"), [(False, None, 5), (True, None, 60), (True, 150, 50)])
def test_it_ends_some_time_after_the_loss(is_taken, timeout_s, lasts_s):
    asked = retry_policy(timeout_s=timeout_s)
    if is_taken:
        asked.note_news()
    lost_at = 100.0
    assert asked.pause_s(lost_at) is not None
    assert asked.pause_s(lost_at + lasts_s - 1.0) is not None
    assert asked.pause_s(lost_at + lasts_s) is None


def test_routers_that_take_it_and_lose_it_are_asked_less_and_less_often():
    asked = retry_policy(num_routers=2)
    pauses = []
    for second in range(0, 50, 5):
        asked.note_taken()
        pauses.append(asked.pause_s(float(second)))
    assert pauses[:3] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("held_s", [0.0, 0.5, 5.0, 30.0, 59.0])
@pytest.mark.parametrize(
    "ends", ["a router's word", "a loss before it was read", "both in turns", "no admission is seen"]
)
def test_without_a_timeout_and_without_output_it_ends_all_the_same(num_routers, held_s, ends):
    """Routers admit it and cannot have it served, or are lost while they read it: 60 s without output, and one try."""
    asked, now, num_tries = retry_policy(num_routers=num_routers), 0.0, 0
    while True:
        num_tries += 1
        asked.note_sent()
        if ends in ("a loss before it was read", "no admission is seen") or (ends == "both in turns" and num_tries % 2):
            asked.note_router_lost(is_proof=False)
            held_s = min(held_s, 5.0)
        else:
            asked.note_taken()
        now += held_s
        pause_s = asked.pause_s(now)
        if pause_s is None:
            break
        now += pause_s
        assert now < 1000.0
    assert now <= 60.0 + 2 * held_s + 2 * MAX_PAUSE_S + num_routers * held_s


def test_what_routers_have_served_for_long_is_asked_for_again_however_often_they_are_lost():
    """An answer in one piece, of minutes: nothing of it comes before its end."""
    asked, now = retry_policy(), 0.0
    for _ in range(20):
        asked.note_sent()
        asked.note_taken()
        now += 59.0
        asked.note_router_lost()
        pause_s = asked.pause_s(now)
        assert pause_s is not None
        now += pause_s
    asked.note_taken()
    asked.note_router_gone()
    assert asked.pause_s(now + 1.0) is not None, "the loss before was lately"
    for _ in range(40):
        now += 2.0
        asked.note_taken()
        asked.note_router_lost()
        asked.pause_s(now)
    assert asked.pause_s(now) is None, "none of these has served it"


def test_a_word_of_a_router_starts_it_afresh():
    asked = retry_policy()
    for _ in range(5):
        asked.pause_s(0.0)
    asked.note_news()
    assert asked.pause_s(1.0) == FIRST_PAUSE_S


def test_losses_count_while_a_request_is_being_read_and_with_proof():
    asked = retry_policy()
    asked.note_router_lost()
    assert (asked.num_routers_lost, asked.was_taken) == (0, False), "it was not sent yet"
    for number in range(1, 6):
        asked.note_sent()
        asked.note_router_lost(is_proof=False)
        assert asked.num_routers_lost == number
    asked.note_router_lost()
    with pytest.raises(RequestQuarantinedError):
        asked.note_router_lost()
    asked.note_taken()
    asked.note_router_lost()
    assert asked.num_routers_lost == 0, "it was read by then"
