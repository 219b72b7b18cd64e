"""Logprobs on their way through a router: they stay with their tokens, whatever happens to these."""

import asyncio
from dataclasses import replace

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InternalError
from holdfast.worker.request import FinishReason, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from tests.loops import on_each_loop
from tests.router.core import Core, delivered, delta, failure
from tests.router.links.test_real_link import RealReplica
from tests.router.site import request, site
from tests.worker.scheduler.test_logits_settings import LogitsRunner


def said_of(*token_ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=token_id, logprob=-float(token_id), rank=1) for token_id in token_ids)


def saying(attempt: int, first: int, *token_ids: int, finish: FinishReason | None = None):
    return replace(delta(attempt, first, *token_ids, finish=finish), logprobs=said_of(*token_ids))


def test_a_stop_string_cuts_them_with_the_tokens():
    core = Core()
    core.up()
    core.submit("a", stop_at=2)
    assert delivered(core.step(saying(1, 0, 0, 1))).logprobs == said_of(0, 1)
    last = delivered(core.step(saying(1, 2, 5, 2, 6, 7)))
    assert (last.token_ids, last.logprobs, last.finish_reason) == ((5, 2), said_of(5, 2), FinishReason.STOP)


def test_those_of_tokens_that_were_seen_before_are_dropped():
    core = Core()
    core.up()
    core.submit("a")
    core.step(saying(1, 0, 0, 1, 2))
    again = delivered(core.step(saying(1, 1, 1, 2, 3, finish=FinishReason.LENGTH)))
    assert (again.first_token_index, again.token_ids, again.logprobs) == (3, (3,), said_of(3))


def test_those_of_the_prompt_are_told_once_with_the_first_token():
    core = Core()
    core.up()
    core.submit("a", prompt_logprobs=1)
    likely = (
        TokenLogprob(token_id=7, logprob=-1.0, rank=2, top=((4, -0.5),)),
        TokenLogprob(token_id=7, logprob=-2.0, rank=1),
    )
    first = delivered(core.step(replace(delta(1, 0, 0, 1), prompt_logprobs=likely)))
    assert first.prompt_logprobs == (None, *likely)
    again = delivered(core.step(replace(delta(1, 0, 0, 1, 2), prompt_logprobs=likely)))
    assert (again.token_ids, again.prompt_logprobs) == ((2,), ())


def test_too_few_logprobs_of_a_prompt_are_an_internal_error():
    core = Core()
    core.up()
    core.submit("a", prompt_logprobs=1)
    assert isinstance(failure(core.step(delta(1, 0, 0))).error, InternalError)


@on_each_loop
async def test_streamed_in_one_piece_or_not_asked_for():
    """The pieces of a stream, unread ones merged, are what the whole answer has."""
    fields = {"max_tokens": 40, "seed": 5, "temperature": 1.5}
    async with site(await RealReplica.start(runner_class=LogitsRunner)) as place:
        whole = await place.stub.Generate(
            request([3, 1], sampling_params=inference_pb2.SamplingParams(logprobs=3, **fields))
        )
        (completion,) = whole.completions
        assert [item.token_id for item in completion.logprobs] == list(completion.token_ids)
        assert all(len(item.top) == 3 for item in completion.logprobs)
        silent = await place.stub.Generate(request([3, 1], sampling_params=inference_pb2.SamplingParams(**fields)))
        assert (silent.completions[0].token_ids, len(silent.completions[0].logprobs)) == (completion.token_ids, 0)
        pieces = []
        async with AsyncClient(place.router.address) as client:
            async for chunk in client.stream([3, 1], SamplingParams(logprobs=3, **fields)):
                assert tuple(item.token_id for item in chunk.logprobs) == chunk.token_ids
                pieces += chunk.logprobs
                await asyncio.sleep(0)
        assert [(item.logprob, item.rank, item.top) for item in pieces] == [
            (item.logprob, item.rank, tuple((best.token_id, best.logprob) for best in item.top))
            for item in completion.logprobs
        ]
