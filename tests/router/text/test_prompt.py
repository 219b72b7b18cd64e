"""What is kept of a prompt, and what is shown of it."""

import pytest

from holdfast.router.text.prompt import (
    MAX_PROMPT_LOGPROBS_BYTES,
    check_prompt_logprobs,
    echoed_text,
    kept_tokens,
)
from holdfast.router.text.text_stream import TextStream
from holdfast.v1 import engine_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import byte_tokenizer


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "kept"),
    [
        (3, 4, 3),
        (100, 4, 8),
        (-1, 4, 6),
        (-1, 1, 8),
        (-1, None, 8),
        (-1, 99, 1),
    ],
)
def test_the_end_of_a_prompt_is_kept(wanted, max_tokens, kept):
    prompt = tuple(range(8))
    params = SamplingParams(truncate_prompt_tokens=wanted, max_tokens=max_tokens)
    assert kept_tokens(prompt, params, max_sequence_len=10) == prompt[-kept:]


@pytest.mark.parametrize(
    ("wanted", "right", "kept"),
    [
        (5, True, (1, 10, 11, 12, 2)),
        (5, False, (1, 12, 13, 14, 2)),
        (100, False, (1, 10, 11, 12, 13, 14, 2)),
        (2, True, (1, 2)),
        (2, False, (1, 2)),
        (1, True, (1,)),  # too few for the tokens around it
        (1, False, (2,)),
    ],
)
def test_tokens_around_a_text_are_kept(wanted, right, kept):
    params = SamplingParams(truncate_prompt_tokens=wanted, truncate_right=right)
    assert kept_tokens((1, 10, 11, 12, 13, 14, 2), params, 20, around=[1, 2]) == kept
    plain = kept_tokens((10, 11, 12, 13), params, 20, around=[1, 2])  # a prompt without them
    assert plain == ((10, 11, 12, 13)[:wanted] if right else (10, 11, 12, 13)[-wanted:])


def test_a_text_prompt_is_echoed_as_it_was_given_unless_it_was_cut():
    whole, cut = SamplingParams(echo=True), SamplingParams(echo=True, truncate_prompt_tokens=2)
    assert echoed_text(byte_tokenizer(), "hello", tuple(b"hello"), whole) == "hello"
    assert echoed_text(byte_tokenizer(), "hello", tuple(b"lo"), cut) == "lo"
    assert echoed_text(byte_tokenizer(), tuple(b"hello"), tuple(b"hello"), whole) == "hello"


@pytest.mark.parametrize("prompt", [b"ho", "h\u00e9".encode()[:-1], "\ufffd".encode()])
@pytest.mark.parametrize("output", [b"\xa9x", b"yx"])
def test_echo_and_output_are_the_text_of_all_tokens(prompt, output):
    """A prompt may end within a character, which the output then ends, or does not."""
    params = SamplingParams(echo=True)
    stream = TextStream(byte_tokenizer(), params, tuple(prompt))
    text = echoed_text(byte_tokenizer(), tuple(prompt), tuple(prompt), params)
    text += stream.push(tuple(output)).text + stream.finish()
    assert text == (prompt + output).decode(errors="replace")


def test_log_probabilities_of_a_prompt_fit_a_message_of_a_replica():
    """Whatever the ids and numbers are; more are refused by name."""
    item = engine_pb2.EngineTokenLogprob(logprob=-1e30, rank=2**32 - 1, token_id=2**32 - 1)
    for num_top in (0, 20, 1024):
        most = MAX_PROMPT_LOGPROBS_BYTES // (32 + 10 * num_top)
        params = SamplingParams(prompt_logprobs=num_top)
        check_prompt_logprobs(params, most)
        with pytest.raises(InvalidRequestError, match=rf"prompt_logprobs = {num_top}: those of {most + 1} tokens take"):
            check_prompt_logprobs(params, most + 1)
        message = engine_pb2.EngineTokenLogprob(top_token_ids=[2**32 - 1] * num_top, top_logprobs=[-1e30] * num_top)
        message.MergeFrom(item)
        delta = engine_pb2.Delta(prompt_logprobs=[message])
        assert delta.ByteSize() <= 32 + 10 * num_top
