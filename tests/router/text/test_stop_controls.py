"""Stop strings with a minimum of tokens, stop strings that stay in the text, and special tokens that show."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.text.text_stream import TextStream
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import byte_tokenizer
from tests.router import sample_tokenizers as sample


def run(text: str, cuts: tuple[int, ...] = (), **params: object) -> tuple[str, int, bool]:
    """Text, tokens kept and whether it stopped, for a text of one token a character, pushed in pieces."""
    stream = TextStream(byte_tokenizer(), SamplingParams(**params))
    token_ids, out, num_tokens = list(text.encode()), "", 0
    for start, end in pairwise([0, *cuts, len(token_ids)]):
        piece = stream.push(token_ids[start:end])
        out, num_tokens = out + piece.text, num_tokens + piece.num_tokens
        if piece.stopped:
            return out, num_tokens, True
    return out + stream.finish(), num_tokens, False


def by_definition(text: str, stop: list[str], min_tokens: int, include: bool) -> tuple[str, int, bool]:
    for end in range(min_tokens + 1, len(text) + 1):
        matched = max((string for string in stop if text[:end].endswith(string)), key=len, default="")
        if matched:
            return text[: end if include else end - len(matched)], end, True
    return text, len(text), False


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("a", 2, True)), (1, ("a", 2, True)), (2, ("a.b", 4, True)), (3, ("a.b", 4, True)), (4, ("a.b.", 4, False))],
)
def test_a_stop_string_counts_from_the_first_token_after_the_minimum(min_tokens, expected):
    assert run("a.b.", stop=".", min_tokens=min_tokens) == expected


def test_a_stop_string_may_begin_before_the_minimum_is_reached():
    assert run("one two", stop="e t", min_tokens=4) == ("on", 5, True)


def test_a_match_that_did_not_count_does_not_count_later():
    """ "ab" is held back as the beginning of "xabz", and must not be found there once stop strings count."""
    assert run("xabyab", stop=["ab", "xabz"], min_tokens=3) == ("xaby", 6, True)


def test_the_stop_string_is_the_end_of_the_text_if_asked_for():
    assert run("one. two", stop=". t", include_stop_str_in_output=True) == ("one. t", 6, True)


@given(
    text=st.text("ab.", max_size=12),
    stop=st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    cuts=st.sets(st.integers(0, 12)),
)
def test_any_text_in_any_pieces_ends_where_the_definition_says(text, stop, min_tokens, include, cuts):
    cuts = tuple(sorted(cut for cut in cuts if cut <= len(text)))
    got = run(text, cuts, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    assert got == by_definition(text, stop, min_tokens, include)


@pytest.mark.parametrize(("skip", "text"), [(True, "the fox"), (False, "the fox</s>")])
def test_special_tokens_show_if_asked_for(skip: bool, text: str, tmp_path: Path):
    tokenizer = sample.byte_level()
    sample.write(tmp_path / "model", tokenizer)
    loaded = sample.Tokenizer.load(str(tmp_path / "model"))
    token_ids = [*loaded.encode("the fox", add_special_tokens=False), tokenizer.token_to_id("</s>")]
    stream = TextStream(loaded, SamplingParams(skip_special_tokens=skip))
    assert stream.push(token_ids).text + stream.finish() == text
