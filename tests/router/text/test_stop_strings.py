import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.text.text_stream import StopStringMatcher


def run(stop: list[str], *pieces: str) -> tuple[list[str], str | None]:
    """What each piece released, with what `finish` gave at the end."""
    matcher = StopStringMatcher(stop)
    released = [matcher.push(piece) for piece in pieces]
    return [*released, matcher.finish()], matcher.matched


def by_brute_force(stop: list[str], text: str) -> tuple[str, str | None]:
    """Text and stop string by trying every end, character by character."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], "one", "two") == (["one", "two", ""], None)


def test_stop_string_within_a_piece() -> None:
    assert run(["STOP"], "go STOP more") == (["go ", ""], "STOP")


def test_stop_string_across_pieces() -> None:
    assert run(["STOP"], "go S", "TO", "P more", "and more") == (["go ", "", "", "", ""], "STOP")


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    assert run(["abcd"], "xxab", "x", "abcx") == (["xx", "abx", "abcx", ""], None)


def test_holds_back_the_shorter_beginning_when_the_longer_fails() -> None:
    assert run(["aab"], "aa", "a", "b") == (["", "a", "", ""], "aab")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["\n\nUser:"], "yes\n\nUse") == (["yes", "\n\nUse"], None)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["world", "lo w"], "hello world") == (["hel", ""], "lo w")
    assert run(["bcd", "abcdef"], "abcdef") == (["a", ""], "bcd")


@pytest.mark.parametrize("stop", [["b", "ab"], ["ab", "b"]])
def test_of_those_complete_together_the_longest_wins(stop: list[str]) -> None:
    assert run(stop, "xab") == (["x", ""], "ab")


def test_nothing_passes_after_a_match() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.push("one. two") == "one"
    assert matcher.push(" three") + matcher.finish() == ""


TEXT = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@given(stop=STOPS, pieces=st.lists(TEXT, max_size=8))
def test_equals_brute_force_however_the_text_is_cut(stop: list[str], pieces: list[str]) -> None:
    released, matched = run(stop, *pieces)
    assert ("".join(released), matched) == by_brute_force(stop, "".join(pieces))


@given(stop=STOPS, text=TEXT)
def test_holds_back_no_more_than_needed(stop: list[str], text: str) -> None:
    matcher = StopStringMatcher(stop)
    released = matcher.push(text)
    held = text[len(released) :]
    if matcher.matched is None and held:
        assert any(string.startswith(held) and string != held for string in stop)
