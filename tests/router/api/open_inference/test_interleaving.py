"""Many requests of one stream, as tasks: order, limits, and what is left over."""

import asyncio
from contextlib import aclosing

import pytest

from holdfast.router.api.open_inference.servicer import interleaved
from tests.loops import on_each_loop


async def each(items):
    for item in items:
        yield item


@on_each_loop
async def test_all_answers_come_and_those_of_one_request_in_order():
    async def answers(number):
        for step in range(number):
            await asyncio.sleep(0)
            yield number, step

    async with aclosing(interleaved(each(range(20)), answers, most_open=4)) as found:
        got = [item async for item in found]
    for number in range(20):
        assert [step for other, step in got if other == number] == list(range(number))
    assert got != sorted(got), "of several they mix"


@on_each_loop
async def test_no_more_requests_are_read_than_may_be_open():
    read, may_go = [], asyncio.Event()

    async def requests():
        for number in range(10):
            read.append(number)
            yield number

    async def answers(number):
        await may_go.wait()
        yield number

    async with aclosing(interleaved(requests(), answers, most_open=3)) as found:
        first = asyncio.ensure_future(anext(found))
        for _ in range(50):
            await asyncio.sleep(0)
        assert read == [0, 1, 2, 3], "the fourth waits for room"
        may_go.set()
        assert len([await first, *[item async for item in found]]) == 10


@on_each_loop
async def test_closing_closes_every_answer_and_leaves_no_task():
    closed, before = [], asyncio.all_tasks()

    async def answers(number):
        try:
            while True:
                yield number
        finally:
            closed.append(number)

    async def endless():
        yield 1
        yield 2
        await asyncio.Event().wait()

    async with aclosing(interleaved(endless(), answers, most_open=9)) as found:
        assert {await anext(found) for _ in range(10)} == {1, 2}
    assert sorted(closed) == [1, 2]
    assert asyncio.all_tasks() == before


@on_each_loop
async def test_requests_that_break_off_end_the_stream_with_their_error():
    async def requests():
        yield 1
        raise ZeroDivisionError

    async def answers(number):
        yield number

    async def collected():
        async with aclosing(interleaved(requests(), answers, most_open=9)) as found:
            return [item async for item in found]

    with pytest.raises(ExceptionGroup) as caught:
        await collected()
    assert caught.group_contains(ZeroDivisionError)
