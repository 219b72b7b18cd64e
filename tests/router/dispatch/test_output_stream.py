"""Output on its way to a reader that may be slow."""

from types import SimpleNamespace

import pytest

from holdfast.router.dispatch.request_stream import MERGED_AT, OutputStream, WakingSink
from holdfast.router.generation import OutputDelta, Usage
from holdfast.worker.errors import ReplicaError
from holdfast.worker.request import FinishReason, SequenceKey, TokenLogprob


def piece(first: int, *token_ids: int, finish: FinishReason | None = None) -> OutputDelta:
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=first + len(token_ids)) if finish else None
    text = "".join(chr(ord("a") + token_id) for token_id in token_ids)
    return OutputDelta(
        request_id="x",
        first_token_index=first,
        token_ids=token_ids,
        text=text,
        finish_reason=finish,
        usage=usage,
        logprobs=said_of(*token_ids),
    )


def said_of(*token_ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=token_id, logprob=-0.5, rank=1) for token_id in token_ids)


def stream(*deltas: OutputDelta) -> OutputStream:
    made = OutputStream(SequenceKey("", "x"), WakingSink(lambda: None))
    for delta in deltas:
        made.push(delta)
    return made


def test_what_is_merged_comes_from_where_the_last_of_it_came_from():
    first = piece(0, 0)._replace(system_fingerprint="first")
    second = piece(1, 1)._replace(system_fingerprint="second", replayed_without_guarantee=True)
    merged = stream(first, second).poll()
    assert (merged.system_fingerprint, merged.replayed_without_guarantee) == ("second", True)


def test_what_is_not_read_yet_is_merged():
    slow = stream(piece(0, 0, 1))
    assert slow.poll() == piece(0, 0, 1)
    slow.push(piece(2, 2))
    slow.push(piece(3, 3, 4, finish=FinishReason.LENGTH))
    rest = slow.poll()
    assert (rest.first_token_index, rest.token_ids, rest.text) == (2, (2, 3, 4), "cde")
    assert rest.logprobs == said_of(2, 3, 4)
    assert (rest.finish_reason, rest.usage.num_completion_tokens) == ("length", 5)
    assert slow.poll() is None


def test_a_reader_hears_of_whatever_comes():
    news = []
    message = OutputStream(SequenceKey("", "x"), WakingSink(lambda: news.append(message.key.request_id)))
    message.push(piece(0, 1))
    message.fail(ReplicaError("lost"))
    assert news == ["x", "x"]


def test_an_error_comes_after_what_was_pushed_before():
    failed = stream(piece(0, 1))
    failed.fail(ReplicaError("lost"))
    assert failed.poll() == piece(0, 1)
    with pytest.raises(ReplicaError, match="lost"):
        failed.poll()


def test_a_reader_that_waits_for_the_end_is_woken_once_and_misses_nothing():
    woken = []
    stream = OutputStream(SequenceKey("", "r"), WakingSink(lambda: woken.append(len(woken))))
    stream.notifies_each_step = False
    for index in range(1000):
        assert not woken
        assert len(stream._pending) < 2 * MERGED_AT, "what nobody has fetched is kept small"
        finish = FinishReason.LENGTH if index == 999 else None
        stream.push(
            OutputDelta(request_id="r", first_token_index=index, token_ids=(index,), text=".", finish_reason=finish)
        )
    assert woken == [0]
    whole = stream.poll()
    assert (whole.token_ids, whole.text, whole.finish_reason) == (tuple(range(1000)), "." * 1000, FinishReason.LENGTH)
    failed = OutputStream(SequenceKey("", "r"), WakingSink(lambda: woken.append("failed")))
    failed.notifies_each_step = False
    failed.fail(ReplicaError("lost"))
    assert woken[1:] == ["failed"]


def test_a_sink_is_offered_what_nothing_waits_before_but_not_the_end():
    taken, takes, news = [], [True], []
    sink = SimpleNamespace(
        take=lambda delta: takes[0] and not taken.append(delta), notify=lambda: news.append(len(taken))
    )
    straight = OutputStream(SequenceKey("", "x"), sink)
    straight.push(piece(0, 0))
    takes[0] = False
    straight.push(piece(1, 1))
    takes[0] = True
    straight.push(piece(2, 2))  # behind what waits
    assert (taken, news) == ([piece(0, 0)], [1, 1])
    assert straight.poll().token_ids == (1, 2)
    straight.push(piece(3, 3))
    straight.push(piece(4, 4, finish=FinishReason.STOP))
    assert (len(taken), straight.poll().token_ids, straight.num_tokens) == (2, (4,), 5)


def test_a_watch_hears_of_the_first_token_and_of_the_end():
    heard = []
    watched = OutputStream(SequenceKey("", "x"), WakingSink(lambda: None))
    watched.watch = heard.append
    every = [piece(0, 0), piece(1, 1), piece(2, 2, finish=FinishReason.STOP)]
    for one in every:
        watched.push(one)
    assert (heard, watched.num_tokens) == ([every[0], every[2]], 3)


def test_what_two_replicas_have_made_is_read_apart():
    stream = OutputStream(SequenceKey("", "x"), WakingSink(lambda: None))
    for index, replica_id in enumerate("aabb"):
        stream.push(OutputDelta("x", index, (index,), "t", replica_id=replica_id))
    first = stream.poll()
    assert (first.token_ids, first.replica_id, stream.has_more) == ((0, 1), "a", True)
    second = stream.poll()
    assert (second.token_ids, second.replica_id, stream.has_more) == ((2, 3), "b", False)


def test_a_sink_gets_a_sibling_s_output_as_the_request_s():
    taken = []
    sibling = OutputStream(SequenceKey("", "x"), SimpleNamespace(take=lambda delta: not taken.append(delta)))
    sibling.index, sibling.echo = 2, "> "
    sibling.push(piece(0, 0))
    sibling.push(piece(1, 1))
    assert [(one.sequence_index, one.text) for one in taken] == [(2, "> a"), (2, "b")]
