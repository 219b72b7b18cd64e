"""Messages of the link are of bounded size, however large a step's cache events and log-probabilities are."""

import pytest

from holdfast.router.text.prompt import MAX_PROMPT_LOGPROBS_BYTES
from holdfast.worker.parameters import MAX_LOGPROBS
from holdfast.worker.request import AttemptKey, FinishReason, TokenDelta, TokenLogprob
from holdfast.worker.step_update import CacheChanges, StepUpdate
from holdfast.worker.wire import delta_pieces, link_responses
from tests.worker.wire.link_ends import NO_LOAD, sent_up


def test_a_large_cache_comes_in_pieces_of_one_update():
    blocks = range(2 * link_responses.MAX_CACHE_EVENTS + 1)
    update = StepUpdate(load=NO_LOAD, step_id=7, cache=CacheChanges(stored=blocks[5:], evicted=blocks[:5]))
    parts = [sent_up(message) for message in link_responses.step_messages(update)]
    assert [(part.step_id, len(part.cache.stored) + len(part.cache.evicted)) for part in parts] == [
        (7, link_responses.MAX_CACHE_EVENTS),
        (7, link_responses.MAX_CACHE_EVENTS),
        (7, 1),
    ]
    assert [block for part in parts for block in part.cache.stored] == list(blocks[5:])
    assert [block for part in parts for block in part.cache.evicted] == list(blocks[:5])


def test_log_probabilities_of_a_long_prompt_come_in_messages_of_bounded_size():
    """However long the prompt, and however many prompts end in one step: each message is far below a link's limit."""
    top = tuple((2**30 + index, -1.5) for index in range(20))

    def delta(number: int, num_prompt: int) -> TokenDelta:
        logprobs = tuple(TokenLogprob(token_id=index, logprob=-1.5, rank=7, top=top) for index in range(num_prompt))
        return TokenDelta(
            attempt=AttemptKey("link-1", number),
            first_token_index=0,
            token_ids=(3,),
            num_cached_tokens=number,
            prompt_logprobs=logprobs,
        )

    deltas = [delta(1, 5), delta(2, 20_000), *(delta(number, 2_000) for number in (3, 4, 5)), delta(6, 0)]
    messages = list(link_responses.step_messages(StepUpdate(step_id=9, load=NO_LOAD, deltas=deltas)))
    assert len(messages) > 8
    assert max(message.ByteSize() for message in messages) < 2**20
    assert {message.step.step_id for message in messages} == {9}
    heard = [one for message in messages for one in sent_up(message).deltas]
    for sent in deltas:
        own = [one for one in heard if one.attempt == sent.attempt.number]
        assert all(not one.token_ids and one.finish_reason is None for one in own[:-1])
        assert (own[-1].token_ids, own[-1].num_cached_tokens) == (sent.token_ids, sent.num_cached_tokens)
        together = [item for one in own for item in one.prompt_logprobs]
        assert [item.token_id for item in together] == [item.token_id for item in sent.prompt_logprobs]
        assert all(item.top == top for item in together)


def with_candidates(number: int, num_prompt: int, num_tokens: int, num_top: int) -> TokenDelta:
    """The last delta of a request, all of whose tokens have as many candidates."""
    top = tuple((2**30 + index, -1.5) for index in range(num_top))
    of_tokens = [TokenLogprob(token_id=index, logprob=-index, rank=7, top=top) for index in range(num_prompt)]
    return TokenDelta(
        attempt=AttemptKey("link-1", number),
        first_token_index=0 if num_prompt else 40,
        token_ids=tuple(range(num_tokens)),
        finish_reason=FinishReason.LENGTH,
        num_cached_tokens=3,
        queued_s=0.5,
        prompt_logprobs=tuple(of_tokens),
        logprobs=tuple(TokenLogprob(token_id=index, logprob=-index, rank=7, top=top) for index in range(num_tokens)),
    )


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([with_candidates(1, 0, 200, MAX_LOGPROBS)], id="many tokens at once"),
        pytest.param([with_candidates(1, 40, 40, MAX_LOGPROBS)], id="a prompt's and an output's together"),
        pytest.param([with_candidates(n, 0, 1, MAX_LOGPROBS) for n in range(150)], id="beams"),
        pytest.param([with_candidates(1, 0, 2, delta_pieces.MAX_LOGPROBS)], id="a token's alone are too many"),
        pytest.param(
            [with_candidates(1, MAX_PROMPT_LOGPROBS_BYTES // (32 + 10 * MAX_LOGPROBS), 1, MAX_LOGPROBS)],
            id="the longest prompt",
        ),
    ],
)
def test_candidates_come_in_messages_of_bounded_size_and_nothing_is_lost(said):
    """What a step says once of a request is said once: with its first tokens there, or its last."""
    messages = list(link_responses.step_messages(StepUpdate(step_id=9, load=NO_LOAD, deltas=said)))
    assert len(messages) > 1
    assert max(message.ByteSize() for message in messages) < 2**20
    heard = [one for message in messages for one in sent_up(message).deltas]
    for sent in said:
        pieces = [one for one in heard if one.attempt == sent.attempt.number]
        of_prompt = [one for one in pieces if not one.token_ids]
        parts = [one for one in pieces if one.token_ids]
        assert pieces == of_prompt + parts
        assert all(one == piece_of_prompt(one) for one in of_prompt)
        for index, one in enumerate(parts):
            assert one.first_token_index == sent.first_token_index + sum(len(part.token_ids) for part in parts[:index])
        for name in ("token_ids", "logprobs", "prompt_logprobs"):
            assert sum((getattr(one, name) for one in pieces), ()) == getattr(sent, name)
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + [sent.finish_reason]
        assert [(one.num_cached_tokens, one.queued_s) for one in parts] == [(3, 0.5)] + [(0, 0.0)] * (len(parts) - 1)


def piece_of_prompt(delta: TokenDelta) -> TokenDelta:
    """A delta that has nothing else."""
    return TokenDelta(attempt=delta.attempt, first_token_index=0, token_ids=(), prompt_logprobs=delta.prompt_logprobs)
