from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.router import sample_tokenizers as sample

FAMILY = "👩‍👩‍👧"
MIXED = f"the fox  says: näive 日本 {FAMILY}! the hen"
ANY_TEXT = st.text(st.sampled_from("the fox  é日👍\u200d\ufffd\n"), max_size=30)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.special_token_ids = tokenizer.special_token_ids
        self.fallback_bytes = tokenizer.fallback_bytes
        self.lengths: dict[int, int] = {}
        self.num_decoded = 0

    def decode_known(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def length_of(self, token_id: int) -> int:
        return len(self.decode((token_id,), skip_special_tokens=False))


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], **kwargs: object) -> list[str]:
    """The text after each token, and that of `finish`."""
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    return [*(detokenizer.push_one(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(text=ANY_TEXT)
@example(text=MIXED)
def test_deltas_add_up_to_the_full_text(root: Path, kind: str, text: str) -> None:
    tokenizer = sample.loaded(kind, root)
    token_ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_deltas_add_up_for_any_tokens(root: Path, kind: str, data: st.DataObject) -> None:
    """Half characters, bytes that are none, special tokens and ids beyond the vocabulary included."""
    tokenizer = sample.loaded(kind, root)
    token_ids = data.draw(sample.any_tokens(tokenizer))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)
    with_special = stream(tokenizer, token_ids, skip_special_tokens=False)
    assert "".join(with_special) == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_grouping_tokens_changes_nothing(root: Path, kind: str, data: st.DataObject) -> None:
    tokenizer = sample.loaded(kind, root)
    token_ids = data.draw(sample.any_tokens(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer)
    groups = data.draw(sample.groupings(token_ids))
    assert "".join(map(detokenizer.push, groups)) + detokenizer.finish() == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_one_token_pushed_is_a_push_of_one_token(root: Path, kind: str, data: st.DataObject) -> None:
    """Token by token, whichever way the tokens before it went."""
    tokenizer = sample.loaded(kind, root)
    token_ids = data.draw(sample.any_tokens(tokenizer))
    plain, either = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    for token_id in token_ids:
        text = either.push_one(token_id) if data.draw(st.booleans()) else either.push((token_id,))
        assert plain.push((token_id,)) == text
    assert plain.finish() == either.finish()


@pytest.mark.parametrize("kind", sample.KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_after_a_prompt_only_the_output_is_shown(root: Path, kind: str, data: st.DataObject) -> None:
    """Where the prompt's own text is what the text of all tokens begins with."""
    tokenizer = sample.loaded(kind, root)
    prompt = tokenizer.encode(data.draw(st.text(st.sampled_from("the fox  é日👍\n"), min_size=1, max_size=12)))
    output = data.draw(sample.any_tokens(tokenizer))
    before, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    assume(before.strip() and text.startswith(before))
    assert "".join(stream(tokenizer, output, context=prompt)) == text[len(before) :]


@pytest.mark.parametrize(("kind", "shown"), [("byte_level", ["a", "👍", "é"]), ("byte_fallback", ["a", "👍é"])])
def test_never_half_a_character(root: Path, kind: str, shown: list[str]) -> None:
    """Nor any that may still become U+FFFD with others of its run."""
    tokenizer = sample.loaded(kind, root)
    deltas = stream(tokenizer, tokenizer.encode("a👍é", add_special_tokens=False))
    assert [delta for delta in deltas if delta] == shown
    assert len(deltas) > 6, "the emoji was spread over several tokens"


@pytest.fixture(scope="session")
def fox_and_a_half(root: Path) -> tuple[Tokenizer, int]:
    """A tokenizer and its token of `fox` and the first byte of an emoji."""
    fast = sample.byte_level()
    token = "fox" + "ð"  # how byte-level BPE writes that byte
    fast.add_tokens([token])
    sample.write(root / "fox_and_a_half", fast)
    return Tokenizer.load(str(root / "fox_and_a_half")), fast.token_to_id(token)


def test_text_before_half_a_character_is_not_held_back(fox_and_a_half: tuple[Tokenizer, int]) -> None:
    tokenizer, half = fox_and_a_half
    deltas = stream(tokenizer, [half, *tokenizer.encode("👍", add_special_tokens=False)[1:]])
    assert deltas[0] == "fox"
    assert "".join(deltas) == "fox👍"


@pytest.mark.parametrize("kind", sample.KINDS)
def test_no_token_waits_in_plain_text(root: Path, kind: str) -> None:
    tokenizer = sample.loaded(kind, root)
    token_ids = tokenizer.encode("the quick brown fox jumps", add_special_tokens=False)
    deltas = stream(tokenizer, token_ids)
    assert [tokenizer.decode(token_ids[: index + 1]) for index in range(len(token_ids))] == [
        "".join(deltas[: index + 1]) for index in range(len(token_ids))
    ]


def test_a_line_break_that_is_a_byte_token_is_out_with_the_next_token_that_is_none(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    token_ids = tokenizer.encode("fox\nfox", add_special_tokens=False)
    line_break = len(tokenizer.encode("fox\n", add_special_tokens=False)) - 1
    text = tokenizer.decode([token_ids[line_break + 1]])
    assert stream(tokenizer, token_ids)[line_break : line_break + 2] == ["", "\n" + text]
    assert stream(tokenizer, token_ids[: line_break + 1])[-2:] == ["", "\n"]


def test_a_run_that_breaks_is_out_at_once(root: Path) -> None:
    """Every byte of it is U+FFFD, also those that were characters by themselves, whatever follows."""
    tokenizer = sample.loaded("byte_fallback", root)
    a, half, never = (tokenizer_byte(tokenizer, byte) for byte in (0x41, 0xC3, 0xFF))
    fox = tokenizer.encode("fox", add_special_tokens=False)[-1]
    deltas = stream(tokenizer, [fox, a, half, never, a, fox, a])
    assert deltas[1:5] == ["", "", "\ufffd" * 3, "\ufffd"]
    assert deltas[6:] == ["", "A"]


def tokenizer_byte(tokenizer: Tokenizer, byte: int) -> int:
    return next(token_id for token_id, other in tokenizer.fallback_bytes.items() if other == byte)


def test_byte_tokens_are_known_by_how_they_are_decoded(root: Path) -> None:
    assert sorted(sample.loaded("byte_fallback", root).fallback_bytes.values()) == list(range(256))
    assert not sample.loaded("byte_level", root).fallback_bytes
    assert not sample.loaded("metaspace", root).fallback_bytes
    assert not sample.loaded("byte_names", root).fallback_bytes


def test_a_long_run_costs_its_length(root: Path) -> None:
    tokenizer = sample.loaded("byte_fallback", root)
    token_ids = tokenizer.encode("the" + "日本👍" * 2000 + "fox", add_special_tokens=False)
    counting = CountingTokenizer(tokenizer)
    assert "".join(stream(counting, token_ids)) == tokenizer.decode(token_ids)  # type: ignore[arg-type]
    assert counting.num_decoded < 10 * len(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_half_a_character_at_the_end_becomes_a_replacement(root: Path, kind: str) -> None:
    tokenizer = sample.loaded(kind, root)
    token_ids = tokenizer.encode("fox👍", add_special_tokens=False)[:-1]
    deltas = stream(tokenizer, token_ids)
    assert "".join(deltas[:-1]) == "fox"
    assert set(deltas[-1]) == {"\ufffd"}


def test_special_tokens_are_skipped_even_within_a_character(root: Path) -> None:
    tokenizer = sample.loaded("byte_level", root)
    first, *rest = tokenizer.encode("👍", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    assert "".join(stream(tokenizer, [eos, first, eos, *rest, eos])) == "👍"
    assert "".join(stream(tokenizer, [*tokenizer.encode("fox"), eos], skip_special_tokens=False)) == "<s>fox</s>"


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_after_a_prompt_the_leading_space_stays(root: Path, kind: str) -> None:
    tokenizer = sample.loaded(kind, root)
    prompt, output = tokenizer.encode("the quick"), tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(stream(tokenizer, output)) == "fox"
    assert "".join(stream(tokenizer, output, context=prompt)) == " fox"


def test_a_prompt_that_ends_within_a_character_is_not_repeated(root: Path) -> None:
    tokenizer = sample.loaded("byte_level", root)
    token_ids = tokenizer.encode("the quick fox 👍 says", add_special_tokens=False)
    cut = len(tokenizer.encode("the quick fox 👍", add_special_tokens=False)) - 1
    assert "".join(stream(tokenizer, token_ids[cut:], context=token_ids[:cut])) == "👍 says"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_only_whole_characters_of_the_prompt_are_context(root: Path, kind: str) -> None:
    tokenizer = sample.loaded(kind, root)
    token_ids = tokenizer.encode("👍" * 8, add_special_tokens=False)
    cut = len(token_ids) - 4
    assert "".join(stream(tokenizer, token_ids[cut:], context=token_ids[:cut])) == "👍"


def test_ids_without_a_token_leave_no_trace(tmp_path: Path) -> None:
    fast = Fast(models.BPE(vocab={"▁the": 0, "▁fox": 2}, merges=[]))
    fast.decoder = decoders.Metaspace()
    sample.write(tmp_path, fast)
    assert "".join(stream(Tokenizer.load(str(tmp_path)), [0, 1, 2, 3, 2])) == "the fox fox"


@pytest.mark.parametrize("text", ["the quick fox " * 200, "日本👍" * 200], ids=["words", "bytes"])
def test_the_cost_of_a_token_does_not_grow(root: Path, text: str) -> None:
    tokenizer = sample.loaded("byte_level", root)
    token_ids = tokenizer.encode(text)
    counting = CountingTokenizer(tokenizer)
    assert "".join(stream(counting, token_ids)) == text  # type: ignore[arg-type]
    assert counting.num_decoded < 10 * len(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_that_never_become_a_character_are_not_hoarded(root: Path, kind: str) -> None:
    tokenizer = sample.loaded(kind, root)
    lone = next(i for i in range(3, tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd")
    counting = CountingTokenizer(tokenizer)
    deltas = stream(counting, [lone] * 1000)  # type: ignore[arg-type]
    assert "".join(deltas) == "\ufffd" * 1000
    assert len(deltas[-1]) < 30
    assert counting.num_decoded < 100 * 1000


@pytest.mark.parametrize("num_lone", range(18, 30))
def test_characters_after_such_bytes_come_whole(fox_and_a_half: tuple[Tokenizer, int], num_lone: int) -> None:
    tokenizer, half = fox_and_a_half
    thumb = tokenizer.encode("👍", add_special_tokens=False)
    lone = [thumb[1]] * num_lone
    for token_ids in ([*lone, *thumb], [*lone, half, *thumb[1:]]):
        assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)
