"""Reasoning splitter: what is reasoning and what content, cut anywhere, and how a template tells."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.tools.chat_style import ChatStyle
from holdfast.router.tools.reasoning import (
    Split,
    ThoughtCounter,
    detect_reasoning,
    splitter_for,
    starts_in_reasoning,
)
from holdfast.worker.errors import InvalidRequestError


def split(name: str, pieces: Sequence[str], starts_inside: bool = False) -> Split:
    splitter = splitter_for(name, starts_inside=starts_inside)
    splits = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return Split("".join(reasoning for reasoning, _ in splits), "".join(content for _, content in splits))


@pytest.mark.parametrize(
    ("text", "starts_inside", "expected"),
    [
        ("<think>\nLet me see.\n\n</think>\n\nParis. ", False, Split("Let me see.", "Paris. ")),
        ("\n<think>a</think>b</think> <think>", False, Split("a", "b</think> <think>")),
        ("Let me see.\n</think>\n\nParis.", True, Split("Let me see.", "Paris.")),
        ("<think>\n\n</think>\n\nParis.", False, Split("", "Paris.")),
        ("  Paris <think>no</think>", False, Split("", "  Paris <think>no</think>")),
        (" <thin", False, Split("", " <thin")),
        ("<think>I wond", False, Split("I wond", "")),
        ("<think>a </thin", False, Split("a </thin", "")),
        ("<think> </think> ", False, Split("", "")),
        ("", False, Split("", "")),
    ],
)
def test_reasoning_is_told_from_content(text: str, starts_inside: bool, expected: Split):
    assert split("qwen3", [text], starts_inside) == split("qwen3", list(text), starts_inside) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nLet me see.\n<channel|>Paris. ", Split("Let me see.", "Paris. ")),
        ("<|channel>thought\n<channel|>Paris", Split("", "Paris")),
        ("<|channel>though I wonder<channel|>", Split("though I wonder", "")),
        ("Paris <channel|>", Split("", "Paris <channel|>")),
    ],
)
def test_the_label_of_gemmas_thoughts_is_dropped(text: str, expected: Split):
    assert detect_reasoning("{{ '<|channel>thought\\n' + m.reasoning + '<channel|>' }}") == "gemma4"
    assert split("gemma4", [text]) == split("gemma4", list(text)) == expected


@given(
    fragments=st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "a", " ", "\n", "<th"]), max_size=12),
    places=st.lists(st.integers(min_value=0, max_value=100), max_size=6),
    starts_inside=st.booleans(),
)
def test_the_split_does_not_depend_on_how_the_text_is_cut(fragments: list[str], places: list[int], starts_inside: bool):
    text = "".join(fragments)
    ends = sorted(place % (len(text) + 1) for place in places)
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = split("qwen3", [text], starts_inside)
    assert split("qwen3", pieces, starts_inside) == split("qwen3", list(text), starts_inside) == whole
    assert (whole.reasoning + whole.content).count("a") == text.count("a")
    if not starts_inside and not text.lstrip().startswith("<think>"):
        assert whole == Split("", text)


def test_reasoning_streams():
    splitter = splitter_for("deepseek_r1")
    assert splitter.push("<think>\nSo") == Split("So", "")
    assert splitter.push(" far </th") == Split(" far", "")
    assert splitter.push("ink>\n") == Split("", "")
    assert splitter.push("\nPa") == Split("", "Pa")
    assert splitter.push("ris ") == Split("", "ris ")


def test_the_template_and_the_prompt_tell():
    qwen = "{{ message.content.split('</think>')[-1] }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert detect_reasoning(qwen) == "qwen3"
    assert detect_reasoning("{% if thinking %}[THINK]{{ thinking }}[/THINK]{% endif %}") == "mistral"
    assert detect_reasoning("{{ messages }}") is None
    assert detect_reasoning(None) is None
    assert starts_in_reasoning("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not starts_in_reasoning("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="reasoning_parser = 'nobody': must be one of qwen3"):
        splitter_for("nobody")


@given(
    before=st.lists(st.integers(2, 9), max_size=4),
    thoughts=st.lists(st.integers(2, 9), max_size=6),
    after=st.lists(st.integers(0, 9), max_size=4),
    is_closed=st.booleans(),
    starts_inside=st.booleans(),
    cuts=st.sets(st.integers(0, 16)),
)
def test_tokens_between_the_tags_are_counted_however_the_output_is_cut(
    before, thoughts, after, is_closed, starts_inside, cuts
):
    output = [*([] if starts_inside else [*before, 0]), *thoughts, *([1, *after] if is_closed else [])]
    counter = ThoughtCounter(0, 1, starts_inside=starts_inside)
    places = [0, *sorted(cut for cut in cuts if cut < len(output)), len(output)]
    for begin, end in pairwise(places):
        counter.push(tuple(output[begin:end]))
    assert counter.num_tokens == len(thoughts)


def test_tags_of_several_tokens_are_not_counted():
    assert ChatStyle(reasoning="qwen3", token_ids={"<think>": 5}).thought_counter(False) is None
    assert ChatStyle(token_ids={"<think>": 5, "</think>": 6}).thought_counter(False) is None
    assert ChatStyle(reasoning="qwen3", token_ids={"<think>": 5, "</think>": 6}).thought_counter(True) is not None
