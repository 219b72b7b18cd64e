"""Log-probabilities of a prompt that come in pieces before the first token."""

from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import ReplicaError
from holdfast.worker.request import FinishReason, TokenDelta, TokenLogprob
from tests.router.core import Core, delivered, failure, sent

PROMPT = tuple(TokenLogprob(token_id=7, logprob=-float(index), rank=1) for index in range(5))


def piece(attempt: int, start: int, end: int, *token_ids: int) -> TokenDelta:
    return TokenDelta(attempt=attempt, first_token_index=0, token_ids=token_ids, prompt_logprobs=PROMPT[start:end])


def asked(core: Core) -> int:
    core.up("r")
    return sent(core.submit("x", num_prompt_tokens=6, prompt_logprobs=0)).attempt


def test_pieces_are_delivered_together_with_the_first_token():
    core = Core()
    attempt = asked(core)
    assert core.step(piece(attempt, 0, 2)) == []
    assert core.step(piece(attempt, 2, 4)) == []
    (demand,) = core.dispatch.demands(core.now)
    assert demand.num_first_tokens == 0
    delta = delivered(core.step(piece(attempt, 4, 5, 1)))
    assert (delta.token_ids, delta.prompt_logprobs) == ((1,), (None, *PROMPT))
    assert core.dispatch.demands(core.now)[0].num_first_tokens == 1


def test_pieces_of_an_attempt_that_was_lost_are_forgotten():
    core = Core()
    attempt = asked(core)
    core.step(piece(attempt, 0, 2))
    core.up("s")
    again = sent(core.down("r", ReplicaError("gone"))).attempt
    core.step(piece(again, 0, 3), replica_id="s")
    assert delivered(core.step(piece(again, 3, 5, 1), replica_id="s")).prompt_logprobs == (None, *PROMPT)


def test_pieces_that_are_missing_end_the_request():
    core = Core()
    attempt = asked(core)
    core.step(piece(attempt, 0, 2))
    assert "could not be turned into text" in str(failure(core.step(piece(attempt, 3, 5, 1))).error)


def test_a_delta_of_many_log_probabilities_comes_in_pieces_of_one_output():
    """A link splits it: the first piece has the prompt's and some tokens, the last one the end."""
    core = Core()
    core.up("r")
    attempt = sent(core.submit("x", num_prompt_tokens=6, prompt_logprobs=0, logprobs=0)).attempt
    of_token = TokenLogprob(token_id=1, logprob=-1.0, rank=1)
    assert core.step(piece(attempt, 0, 5)) == []
    actions = core.step(
        TokenDelta(attempt=attempt, first_token_index=0, token_ids=(1, 1), logprobs=(of_token,) * 2),
        TokenDelta(
            attempt=attempt,
            first_token_index=2,
            token_ids=(1,),
            logprobs=(of_token,),
            finish_reason=FinishReason.LENGTH,
        ),
    )
    first, last = [action for action in actions if isinstance(action, OutputDelta)]
    assert (first.token_ids, len(first.logprobs), first.prompt_logprobs) == ((1, 1), 2, (None, *PROMPT))
    assert (last.token_ids, len(last.logprobs), last.prompt_logprobs) == ((1,), 1, ())
    assert (first.finish_reason, last.finish_reason) == (None, FinishReason.LENGTH)
