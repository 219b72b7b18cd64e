"""What a held call makes of the bytes of a stream, without any IO."""

from holdfast.cluster.client.resumable_call import HeldCall, error_event
from holdfast.cluster.client.retry_policy import NEWS_S, RetryPolicy
from holdfast.router.router_losses import ROUTERS_LOST


def test_marks_may_come_in_any_pieces():
    policy = RetryPolicy(num_routers=1, connect_s=1, reconnect_s=1, timeout_s=None, draw=lambda: 0.5, now=0.0)
    wire = (
        b": waiting\n\n"
        b'data: {"a": ": resume "}\n\n: resume {"first_token_index":0,"token_ids":[1],"text_length":1}\n\n'
        b'data: b\n\ndata: c\n\n: resume {"first_token_index":1,"token_ids":[2,3],"text_length":4,"is_last":true}\n\n'
    )
    for size in range(1, len(wire)):
        call = HeldCall(b"{}", policy, 0.0)
        call.submission(0.0)
        call.verdict(200, "id 5", None)
        got = b"".join(call.push(wire[at : at + size]) for at in range(0, len(wire), size))
        assert got.removeprefix(b": waiting\n\n") == b'data: {"a": ": resume "}\n\ndata: b\n\ndata: c\n\n'
        assert (call.record.sequences[0].token_ids, call.record.sequences[0].text_length) == ([1, 2, 3], 5)
        assert call.is_over


def test_an_error_keeps_its_vendors_shape():
    assert error_event(b'{"error": {}}').startswith(b"data: ")
    assert error_event(b'{"type": "error", "error": {}}').startswith(b"event: error\ndata: ")
    assert b"server_error" in error_event(b"<html>")


def test_a_connection_that_breaks_at_once_or_late_is_no_proof():
    """A proxy without routers breaks it at once; what breaks late was admitted long before."""
    policy = RetryPolicy(
        num_routers=9, connect_s=1, reconnect_s=60, timeout_s=None, draw=lambda: 0.5, now=0.0, sees_admission=False
    )
    call, now = HeldCall(b"{}", policy, 0.0), 0.0
    for number, (lasted_s, is_long) in enumerate(
        [
            (0.01, False),
            (0.01, False),
            (20.0, False),
            (5.0, False),
            (0.01, False),
            (1.0, True),
            (0.01, False),
            (1.0, True),
        ]
    ):
        headers, _ = call.submission(now)
        assert int(headers.get(ROUTERS_LOST, 0)) == number
        now += lasted_s
        call.note_lost(now, was_sent=True)
        pause_s = call.pause_s(now)
        assert (pause_s >= NEWS_S) is is_long
    call.submission(now)
    call.note_lost(now + 5.0, was_sent=False)
    assert call.pause_s(79.0) is not None, "the loss at 20.02 s was that of a router that had served it"
    assert call.pause_s(80.1) is None


def test_an_answer_clears_it():
    policy = RetryPolicy(num_routers=1, connect_s=1, reconnect_s=60, timeout_s=None, draw=lambda: 0.5, now=0.0)
    call = HeldCall(b"{}", policy, 0.0)
    for number in range(5):
        call.submission(number)
        call.note_lost(number + 0.5, was_sent=True)
        headers, _ = call.submission(number)
        assert headers[ROUTERS_LOST] == "1"
        call.verdict(200, "id 5", None)
        call.note_lost(number + 0.9, was_sent=True)
