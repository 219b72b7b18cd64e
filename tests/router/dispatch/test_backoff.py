"""Pauses between dials: they grow to a limit, are drawn apart, and begin anew once a replica has answered."""

from holdfast.router.dispatch.circuit_breaker import FIRST_PAUSE_S, FORGIVEN_S, Backoff


def failed(num_times: int) -> Backoff:
    backoff = Backoff(max_pause_s=2.0)
    for _ in range(num_times):
        backoff.note_failure()
    return backoff


def test_pauses_double_up_to_a_limit():
    pauses = [failed(num_times).pause_s(1.0) for num_times in (0, 1, 2, 5, 6, 5000)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 32 * FIRST_PAUSE_S, 2.0, 2.0]


def test_a_draw_takes_up_to_half_of_a_pause_away():
    assert failed(0).pause_s(0.0) == FIRST_PAUSE_S / 2


def test_a_replica_that_was_up_is_dialled_again_soon():
    backoff = failed(7)
    backoff.note_up()
    assert backoff.pause_s(1.0) == FIRST_PAUSE_S


def test_faults_of_ours_are_dialled_after_ever_later_though_the_replica_answers():
    backoff, pauses = Backoff(max_pause_s=2.0), []
    for _ in range(8):
        backoff.note_up()
        backoff.note_fault(lasted_s=0.1)
        pauses.append(backoff.pause_s(1.0) / FIRST_PAUSE_S)
    assert pauses == [2, 4, 8, 16, 32, 40, 40, 40]
    backoff.note_fault(lasted_s=FORGIVEN_S)
    assert backoff.pause_s(1.0) == 2 * FIRST_PAUSE_S
