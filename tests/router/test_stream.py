"""Output on its way to a reader that may be slow."""

import asyncio
from dataclasses import replace

import pytest

from router.events import Deliver, Usage
from router.stream import OutputStream
from worker.errors import ReplicaError
from worker.request import FinishReason, TokenLogprob


def piece(first: int, *token_ids: int, finish: FinishReason | None = None) -> Deliver:
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=first + len(token_ids)) if finish else None
    text = "".join(chr(ord("a") + token_id) for token_id in token_ids)
    return Deliver(
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


def test_what_is_merged_comes_from_where_the_last_of_it_came_from():
    async def scenario():
        stream = OutputStream("x", "m")
        stream.push(replace(piece(0, 0), fingerprint="first"))
        stream.push(replace(piece(1, 1), fingerprint="second", identity_guaranteed=False))
        return await anext(stream)

    merged = asyncio.run(scenario())
    assert (merged.fingerprint, merged.identity_guaranteed) == ("second", False)


def test_what_is_not_read_yet_is_merged():
    async def scenario():
        stream = OutputStream("x", "m")
        stream.push(piece(0, 0, 1))
        first = await anext(stream)
        stream.push(piece(2, 2))
        stream.push(piece(3, 3, 4, finish=FinishReason.LENGTH))
        return [first, *[delivery async for delivery in stream]]

    first, second = asyncio.run(scenario())
    assert first == piece(0, 0, 1)
    assert (second.first_token_index, second.token_ids, second.text) == (2, (2, 3, 4), "cde")
    assert second.logprobs == said_of(2, 3, 4)
    assert (second.finish_reason, second.usage.num_completion_tokens) == ("length", 5)


def test_a_reader_that_waits_is_woken():
    async def scenario():
        stream = OutputStream("x", "m")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.push(piece(0, 1))
        return await reader

    assert asyncio.run(scenario()) == piece(0, 1)


def test_an_error_comes_after_what_was_pushed_before():
    async def scenario():
        stream = OutputStream("x", "m")
        stream.push(piece(0, 1))
        stream.fail(ReplicaError("lost"))
        assert await anext(stream) == piece(0, 1)
        with pytest.raises(ReplicaError, match="lost"):
            await anext(stream)

    asyncio.run(scenario())


def test_the_whole_is_everything_up_to_the_end():
    async def scenario():
        stream = OutputStream("x", "m")
        reader = asyncio.create_task(stream.whole())
        for index in range(3):
            await asyncio.sleep(0)
            stream.push(piece(index, index, finish=FinishReason.STOP if index == 2 else None))
        return await reader

    assert asyncio.run(scenario()) == piece(0, 0, 1, 2, finish=FinishReason.STOP)


def test_a_whole_that_fails_is_an_error():
    async def scenario():
        stream = OutputStream("x", "m")
        stream.push(piece(0, 1))
        stream.fail(ReplicaError("lost"))
        with pytest.raises(ReplicaError):
            await stream.whole()

    asyncio.run(scenario())
