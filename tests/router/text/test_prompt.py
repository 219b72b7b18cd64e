"""What is kept of a prompt, and what is shown of it."""

import pytest

from holdfast.router.text.prompt import echoed_text, kept_tokens
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import byte_tokenizer


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "kept"),
    [
        (None, 4, 8),
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
