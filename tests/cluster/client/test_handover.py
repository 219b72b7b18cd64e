"""A stream on its way from a loop's thread to the one that iterates: order, ends, and how far it is read ahead."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from holdfast.cluster.client.blocking_client import MAX_AHEAD, Handover


class Source:
    """Numbers, up to an end, an error or for ever; it notes how many were taken, and whether it was closed."""

    def __init__(self, num_items: int | None = None, error: Exception | None = None) -> None:
        self.num_taken = 0
        self.is_closed = False
        self._num_items = num_items
        self._error = error

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while self.num_taken != self._num_items:
                self.num_taken += 1
                yield self.num_taken
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


@contextmanager
def handed_over(source: Source) -> Iterator[tuple[Handover[int], asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    handover = Handover(source.items(), loop)
    try:
        yield handover, loop
        asyncio.run_coroutine_threadsafe(handover.end(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def turns(loop: asyncio.AbstractEventLoop, count: int = 10 * MAX_AHEAD) -> None:
    """Lets the loop go round so often."""

    async def go_round() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(go_round(), loop).result(10)


def test_all_items_come_in_order_however_many_wait():
    with handed_over(Source(20 * MAX_AHEAD)) as (handover, _):
        assert list(handover) == list(range(1, 20 * MAX_AHEAD + 1))
        assert list(handover) == [], "an end is an end for whoever asks again"


def test_an_error_comes_after_all_items():
    with handed_over(Source(3, ValueError("broken"))) as (handover, _):
        assert [next(handover) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(ValueError, match="broken"):
            next(handover)


def test_nothing_is_read_before_the_first_is_asked_for():
    source = Source()
    with handed_over(source) as (_, loop):
        turns(loop)
        assert source.num_taken == 0


def test_a_stream_waits_for_a_reader_who_is_slow():
    source = Source()
    with handed_over(source) as (handover, loop):
        next(handover)
        turns(loop)
        assert MAX_AHEAD <= source.num_taken <= MAX_AHEAD + 1
        for _ in range(5):
            before = source.num_taken
            for _ in range(MAX_AHEAD):
                next(handover)
            turns(loop)
            assert before < source.num_taken <= before + MAX_AHEAD + 1
    assert source.is_closed


def test_closing_ends_the_stream_and_answers_who_still_reads():
    source = Source()
    with handed_over(source) as (handover, loop):
        assert next(handover) == 1
        asyncio.run_coroutine_threadsafe(handover.end(), loop).result(10)
        assert source.is_closed
        with pytest.raises(RuntimeError, match="closed while its stream"):
            list(handover)


@pytest.mark.parametrize(
    "when", ["before the first item is asked for", "between asking and beginning", "after the end"]
)
def test_a_stream_that_was_closed_before_it_was_read_answers_its_reader(when):
    source = Source(3)
    with handed_over(source) as (handover, loop):
        if when == "after the end":
            assert list(handover) == [1, 2, 3]
        got: list[BaseException | list[int]] = []

        def read() -> None:
            try:
                got.append(list(handover))
            except RuntimeError as error:
                got.append(error)

        reader = threading.Thread(target=read, daemon=True)
        if when == "between asking and beginning":
            reader_began, begin = threading.Event(), handover._begin
            handover._begin = reader_began.set
            reader.start()
            assert reader_began.wait(10)
            asyncio.run_coroutine_threadsafe(handover.end(), loop).result(10)
            loop.call_soon_threadsafe(begin)
        else:
            asyncio.run_coroutine_threadsafe(handover.end(), loop).result(10)
            reader.start()
        reader.join(10)
        assert not reader.is_alive()
        if when == "after the end":
            assert got == [[]]
        else:
            assert isinstance(got[0], RuntimeError)
            assert source.num_taken == 0
