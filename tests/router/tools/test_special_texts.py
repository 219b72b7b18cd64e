"""Special token filter: what it takes out, cut anywhere."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.router.tools.reasoning import SpecialTextFilter, unwanted_texts


def filtered(texts: tuple[str, ...], pieces: list[str]) -> str:
    """As the filter gives it."""
    special = SpecialTextFilter(texts)
    return "".join([*map(special.push, pieces), special.finish()])


def test_other_special_tokens_are_taken_out():
    texts = unwanted_texts(["</s>", "[INST]", "[TOOL_CALLS]"], ["[TOOL_CALLS]", "[ARGS]"])
    assert texts == ("</s>", "[INST]")
    assert filtered(texts, ["a [TOOL_CALLS]f{}</", "s>b</"]) == "a [TOOL_CALLS]f{}b</"
    assert unwanted_texts(["</s>"], ["<tool_call>"]) is None
    assert filtered((), ["a", "b"]) == "ab"


def test_text_waits_no_longer_than_a_special_one_may_begin():
    special = SpecialTextFilter(("</s>", "<pad>"))
    assert [special.push(piece) for piece in ("a<", "b <p", "ad> c", "</s", "")] == ["a", "<b ", " c", "", ""]
    assert special.finish() == "</s"


@given(
    texts=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=4, unique=True),
    text=st.text("abcd", max_size=30),
    places=st.lists(st.integers(min_value=0, max_value=30), max_size=6),
)
@example(["a", "ab"], "ab", [1])
@example(["bc", "abcd"], "abc", [2])
def test_the_text_does_not_depend_on_how_it_is_cut(texts: list[str], text: str, places: list[int]):
    ends = sorted(place % (len(text) + 1) for place in places)
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    expected = re.sub(longest_first, "", text) if texts else text
    assert filtered(tuple(texts), pieces) == filtered(tuple(texts), list(text)) == expected
