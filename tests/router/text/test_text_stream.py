from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import SamplingParams
from tests.examples import examples
from tests.router import sample_tokenizers as sample


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture
def tokenizer(root: Path) -> Tokenizer:
    return sample.loaded("byte_level", root)


def run(
    tokenizer: Tokenizer, stop: Sequence[str], groups: Sequence[Sequence[int]], **kwargs: object
) -> tuple[str, int, bool]:
    """Text, number of tokens kept and whether it stopped, as a router would add them up."""
    stream = TextStream(tokenizer, SamplingParams(stop=stop), **kwargs)
    text, num_tokens = "", 0
    for group in groups:
        piece = stream.push(group)
        text, num_tokens = text + piece.text, num_tokens + piece.num_tokens
        if piece.stopped:
            return text, num_tokens, True
    return text + stream.finish(), num_tokens, False


def by_brute_force(tokenizer: Tokenizer, stop: Sequence[str], token_ids: Sequence[int]) -> tuple[str, int, bool]:
    """Decodes ever longer beginnings in full, and looks for the first character at which a stop string is complete."""
    for num_tokens in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:num_tokens]).rstrip("\ufffd")
        for end in range(1, len(text) + 1):
            matched = max((string for string in stop if text[:end].endswith(string)), key=len, default="")
            if matched:
                return text[: end - len(matched)], num_tokens, True
    return tokenizer.decode(token_ids), len(token_ids), False


def test_without_stop_strings_all_tokens_become_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the quick fox 👍")
    assert run(tokenizer, [], [token_ids]) == ("the quick fox 👍", len(token_ids), False)


def test_tokens_after_the_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the fox. the hen", add_special_tokens=False)
    num_kept = len(tokenizer.encode("the fox.", add_special_tokens=False))
    assert run(tokenizer, ["."], [token_ids]) == ("the fox", num_kept, True)


def test_a_stop_string_over_several_pushes(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the fox says good morning", add_special_tokens=False)
    text, num_tokens, stopped = run(tokenizer, ["says good"], [[token_id] for token_id in token_ids])
    assert (text, stopped) == ("the fox ", True)
    assert tokenizer.decode(token_ids[:num_tokens]) == "the fox says good"


def test_a_piece_says_when_it_stopped(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="fox"))
    before, hit, after = (
        stream.push(tokenizer.encode(text, add_special_tokens=False)) for text in ("the ", "fox", "x")
    )
    assert (before.text, before.stopped) == ("the ", False)
    assert (hit.text, hit.stopped) == ("", True)
    assert (after.text, after.num_tokens, after.stopped) == ("", 0, True)
    assert stream.finish() == ""


def test_what_was_held_back_comes_with_finish(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="fox!"))
    assert stream.push(tokenizer.encode("the fox")).text == "the "
    assert stream.finish() == "fox"


def test_half_a_character_comes_after_what_was_held_back(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("👍", add_special_tokens=False)[:2]
    text, _, stopped = run(tokenizer, ["fox!"], [[*tokenizer.encode("the fox"), *half]])
    assert (text, stopped) == ("the fox\ufffd", False)


def test_an_emoji_can_be_a_stop_string(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("fox 👍 hen", add_special_tokens=False)
    text, num_tokens, stopped = run(tokenizer, ["👍"], [token_ids])
    assert (text, stopped) == ("fox ", True)
    assert tokenizer.decode(token_ids[:num_tokens]) == "fox 👍"


def test_a_line_break_that_is_a_byte_token_stops_at_once(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    token_ids = tokenizer.encode("fox\nhen", add_special_tokens=False)
    text, num_tokens, stopped = run(tokenizer, ["\n"], [token_ids])
    assert (text, stopped) == ("fox", True)
    assert tokenizer.decode(token_ids[:num_tokens]) == "fox\n"


def test_text_may_go_on_from_the_prompt(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    prompt, output = tokenizer.encode("the quick"), tokenizer.encode("fox", add_special_tokens=False)
    assert run(tokenizer, [], [output], prompt_token_ids=prompt)[0] == " fox"


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_equals_brute_force_however_tokens_are_grouped(root: Path, data: st.DataObject) -> None:
    tokenizer = sample.loaded("byte_level", root)
    words = st.sampled_from(["the", " fox", "\n", "é", "👍", " the fox", "o", " "])
    token_ids = tokenizer.encode("".join(data.draw(st.lists(words, max_size=12))))
    stop = data.draw(
        st.lists(st.sampled_from(["fox", "ox\n", "👍", " the f", "\n\n", "o", "é 👍", "the fox the"]), max_size=3)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    borders = [0, *cuts, len(token_ids)]
    groups = [token_ids[first:last] for first, last in pairwise(borders)]
    expected = by_brute_force(tokenizer, stop, token_ids)
    assert run(tokenizer, stop, groups) == expected
    assert run(tokenizer, stop, [[token_id] for token_id in token_ids]) == expected


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_equals_brute_force_for_any_tokens(root: Path, kind: str, data: st.DataObject) -> None:
    """Stop strings that are spelled by bytes end the output at once, although their run might still break."""
    tokenizer = sample.loaded(kind, root)
    token_ids = data.draw(sample.any_tokens(tokenizer))
    words = st.sampled_from(["A", "\n", "é", "👍", "A\n", "é日", "fox", "AA", " A", "日 ", "the", "<0x41>"])
    stop = data.draw(st.lists(words, max_size=3))
    expected = by_brute_force(tokenizer, stop, token_ids)
    assert run(tokenizer, stop, data.draw(sample.groupings(token_ids))) == expected
    assert run(tokenizer, stop, [[token_id] for token_id in token_ids]) == expected


def test_a_stop_string_in_a_run_counts_after_the_least_tokens_only(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    ids = {byte: token_id for token_id, byte in tokenizer.fallback_bytes.items()}
    fox = tokenizer.encode("fox", add_special_tokens=False)[-1]
    stream = TextStream(tokenizer, SamplingParams(stop="A", min_tokens=2))
    pieces = [stream.push([token_id]) for token_id in (fox, ids[0x41], ids[0x42], fox, ids[0x41])]
    text = tokenizer.decode([fox])
    assert [piece.text for piece in pieces] == [text, "", "", "AB" + tokenizer.decode([fox]), ""]
    assert [piece.stopped for piece in pieces] == [False, False, False, False, True]


def test_a_stop_string_that_was_guessed_and_did_not_come_ends_nothing(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    ids = {byte: token_id for token_id, byte in tokenizer.fallback_bytes.items()}
    token_ids = [ids[0x41], ids[0xFF], ids[0x42]]
    assert run(tokenizer, ["AB"], [token_ids]) == ("\ufffd" * 3, 3, False)
