"""What a held call makes of the bytes of a stream, without any IO."""

from holdfast.cluster.client.held_call import HeldCall, error_event
from holdfast.cluster.client.retry_policy import RetryPolicy


def test_marks_may_come_in_any_pieces():
    policy = RetryPolicy(num_routers=1, connect_s=1, reconnect_s=1, timeout_s=None, draw=lambda: 0.5, now=0.0)
    wire = (
        b": waiting\n\n"
        b'data: {"a": ": held "}\n\n: held {"s":0,"t":[1],"c":1,"p":"f"}\n\n'
        b'data: b\n\ndata: c\n\n: held {"s":0,"t":[2,3],"c":4,"p":"f","end":true}\n\n'
    )
    for size in range(1, len(wire)):
        call = HeldCall(b"{}", policy, 0.0)
        call.submission(0.0)
        call.verdict(200, "id 5", None)
        got = b"".join(call.push(wire[at : at + size]) for at in range(0, len(wire), size))
        assert got.removeprefix(b": waiting\n\n") == b'data: {"a": ": held "}\n\ndata: b\n\ndata: c\n\n'
        assert (call.noted.sequences[0].token_ids, call.noted.sequences[0].num_chars) == ([1, 2, 3], 5)
        assert call.is_over


def test_an_error_keeps_its_vendors_shape():
    assert error_event(b'{"error": {}}').startswith(b"data: ")
    assert error_event(b'{"type": "error", "error": {}}').startswith(b"event: error\ndata: ")
    assert b"server_error" in error_event(b"<html>")
