"""Chunks that are written where they are made: in order, one at a time, and with errors for the task."""

import asyncio
import gc
import weakref

import grpc
import pytest

from holdfast.router.api.grpc.chunk_writer import ChunkWriter
from holdfast.router.generation import OutputDelta
from tests.loops import on_each_loop
from tests.router.answers import new_answer


class Call:
    """A call whose writes last until they are let through, as gRPC's do."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.open: list[asyncio.Future[None]] = []
        self.error: Exception | None = None
        self.was_left = False

    async def write(self, chunk: bytes) -> None:
        self.written.append(chunk)
        if self.error is not None:
            raise self.error
        self.open.append(asyncio.get_running_loop().create_future())
        try:
            await self.open[-1]
        except GeneratorExit:
            self.was_left = True
            raise


class Stream:
    """A writer and the signal of its task, which waits if `waits`."""

    def __init__(self, *, waits: bool = True) -> None:
        self.call, self.sink = Call(), new_answer()
        self.writer = ChunkWriter(self.call.write, lambda delta: delta.text.encode(), self.sink)
        if waits:
            self.sink.next()

    def take(self, text: str) -> bool:
        return self.sink.take(OutputDelta(request_id="r", first_token_index=0, token_ids=(1,), text=text))


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@on_each_loop
async def test_a_chunk_is_written_at_once_while_the_task_waits_and_none_while_it_is_at_work():
    assert not Stream(waits=False).take("a"), "the task has not waited yet"
    stream = Stream()
    assert stream.take("a")
    assert stream.call.written == [b"a"], "before any turn of the event loop"
    assert not stream.take("b"), "one is being written"
    stream.call.open[0].set_result(None)
    await turns()
    assert stream.take("b")
    stream.call.open[1].set_result(None)
    await turns()
    assert stream.call.written == [b"a", b"b"]
    stream.sink.notify()
    assert not stream.take("c"), "the task has been woken, and what it is woken for comes first"
    await stream.writer.settle()


@on_each_loop
async def test_the_task_writes_only_behind_what_is_being_written():
    stream = Stream()
    stream.take("a")
    settled = asyncio.create_task(stream.writer.settle())
    await turns()
    assert not settled.done()
    stream.call.open[0].set_result(None)
    await settled


@on_each_loop
async def test_errors_wake_the_task_and_are_raised_to_it():
    gone, broken, late = Stream(), Stream(), Stream()
    gone.call.error = grpc.aio.UsageError("the call is over")
    assert gone.take("a")
    broken.writer = ChunkWriter(broken.call.write, lambda delta: 1 // 0, broken.sink)
    assert broken.take("a"), "whoever has made it is not told: it is the stream's own fault"
    assert late.take("a")
    assert not late.sink.is_set
    late.call.open[0].set_exception(grpc.aio.UsageError("gone meanwhile"))
    await turns()
    for stream, error in ((gone, grpc.aio.UsageError), (broken, ZeroDivisionError), (late, grpc.aio.UsageError)):
        assert stream.sink.is_set
        assert not stream.take("b")
        with pytest.raises(error):
            await stream.writer.settle()
    settling = Stream()
    settling.take("a")
    settled = asyncio.create_task(settling.writer.settle())
    await turns()
    settling.call.open[0].set_exception(grpc.aio.UsageError("gone meanwhile"))
    with pytest.raises(grpc.aio.UsageError):
        await settled


@on_each_loop
async def test_a_write_that_failed_holds_no_answer():
    """Without the garbage collector: an answer has its request, whose prompt may be long."""
    stream = Stream()
    stream.take("a")
    stream.call.open[0].set_exception(grpc.aio.UsageError("gone meanwhile"))
    await turns()
    stream.writer.close()
    stream.sink.close()
    answer, gone = weakref.ref(stream.sink), stream.call.open[0]
    gc.disable()
    try:
        del stream
        assert answer() is None
    finally:
        gc.enable()
    assert gone.exception() is not None, "gRPC may keep the future that has the error"


@on_each_loop
async def test_a_task_that_ends_leaves_its_last_chunk():
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    stream = Stream()
    stream.take("a")
    stream.writer.close()
    stream.writer.close()
    assert stream.call.was_left
    assert stream.call.open[0].cancelled()
    await turns()
    done = Stream()
    done.take("a")
    done.call.open[0].set_result(None)
    done.writer.close()
    await turns()
    assert done.call.was_left, "its callback was on its way"
    assert not failures, "a callback that comes late finds nothing to do"
