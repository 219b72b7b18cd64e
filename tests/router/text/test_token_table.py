"""Bytes of tokens, and where tokens begin in a text: against whole texts, for every kind of tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.api.http.tokens_with_text import TextOffsets
from holdfast.router.text.prompt import echoed_text
from holdfast.router.text.token_table import bytes_of_piece
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import SamplingParams
from tests.examples import examples
from tests.fakes import byte_tokenizer
from tests.router.sample_tokenizers import KINDS, WORDS, any_tokens, loaded

TEXTS = ["the quick brown fox", " hens say 👍 é日本\n", "a😀b", "good morning, the 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag", "e\u0301 naïve"]
WHOLE = [kind for kind in KINDS if kind not in ("byte_names", "metaspace", "word_piece", "unigram")]
"""Kinds that can write any text."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind, text, root):
    tokenizer = loaded(kind, root)
    joined = b"".join(map(tokenizer.tokens.bytes_of, tokenizer.encode(text, add_special_tokens=False)))
    assert joined == (b" " if kind == "byte_fallback" else b"") + text.encode()


@pytest.mark.parametrize("kind", ["metaspace", "unigram", "word_piece", "byte_names"])
def test_a_word_keeps_its_space(kind, root):
    tokenizer = loaded(kind, root)
    text = "<0x41> fox" if kind == "byte_names" else WORDS.strip()
    joined = b"".join(map(tokenizer.tokens.bytes_of, tokenizer.encode(text, add_special_tokens=False)))
    assert joined == b" " + text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_tokens_are_distinct_and_say_their_bytes(kind, root):
    tokenizer = loaded(kind, root)
    ids = range(tokenizer.vocab_size + 3)
    names = tokenizer.tokens.distinct_names(ids)
    assert len(set(names.values())) == len(ids)
    assert all("\ufffd" not in name or "\ufffd".encode() in tokenizer.tokens.bytes_of(i) for i, name in names.items())


def test_a_part_of_a_character_is_written_as_bytes():
    tokens = byte_tokenizer().tokens
    assert (tokens.bytes_of(0xF0), tokens.text_of(0xF0), tokens.name_of(0xF0)) == (b"\xf0", "\\xf0", "bytes:\\xf0")
    assert tokens.name_of(ord("a")) == "a"
    assert tokens.bytes_of(10_000) == b""
    assert bytes_of_piece("<｜User｜>") == "<｜User｜>".encode()


def test_equal_texts_get_different_names(root):
    tokenizer = loaded("byte_fallback", root)
    letter, byte = tokenizer._codec.token_id("t"), tokenizer._codec.token_id("<0x74>")
    assert tokenizer.tokens.distinct_names([letter, byte, byte]) == {letter: "t", byte: "bytes:\\x74"}
    beyond = tokenizer.vocab_size
    assert list(tokenizer.tokens.distinct_names([beyond, beyond + 1, beyond + 2]).values()) == [
        "",
        "bytes:",
        f"token_id:{beyond + 2}",
    ]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_offsets_point_to_the_text_of_each_token(kind, data, root):
    """Of whole characters, the text of a token stands at its offset, whatever is around it."""
    tokenizer = loaded(kind, root)
    prompt = data.draw(any_tokens(tokenizer), label="prompt")
    output = data.draw(any_tokens(tokenizer), label="output")
    params = SamplingParams(skip_special_tokens=data.draw(st.booleans()), max_tokens=1)
    text = text_after(tokenizer, params, prompt, output)
    offsets = TextOffsets(tokenizer, params, prompt)
    found = [offsets.push(token_id) for token_id in output]
    assert found == sorted(found)
    assert all(0 <= at <= len(text) for at in found), (found, text)
    for at, token_id in zip(found, output, strict=True):
        written = tokenizer.tokens.bytes_of(token_id)
        is_shown = not (params.skip_special_tokens and token_id in tokenizer.special_token_ids)
        if is_shown and token_id not in tokenizer.fallback_bytes and is_whole(written):
            first = at == 0 and written.startswith(b" ") and not text.startswith(" ")
            begins = kind == "word_piece" and at == 0
            assert begins or text.startswith(written.decode()[first:], at), (at, written, text)


@pytest.mark.parametrize("second", [0xA0, 0xA1, 0xBF, 0x9F])
def test_the_first_bytes_of_a_surrogate_are_two_characters(second, root):
    """0x9F may begin a character behind 0xED, and is one replacement where that does not come."""
    tokenizer = loaded("byte_level", root)
    ids = {tokenizer.tokens.bytes_of(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    output = [ids[b"\xed"], ids[bytes((second,))], ids[b"a"]]
    params = SamplingParams(max_tokens=1)
    offsets = TextOffsets(tokenizer, params, [])
    found = [offsets.push(token_id) for token_id in output]
    assert text_after(tokenizer, params, [], output)[found[-1] :] == "a"
    assert found == ([0, 0, 1] if second == 0x9F else [0, 1, 2])


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_prompt", [0, 1, 2, 3, 4, 5])
def test_offsets_of_characters_in_several_tokens(kind, text, num_prompt, root):
    """A token within a character begins where the character does; a prompt may end within one."""
    tokenizer = loaded(kind, root)
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams()
    prompt, output = ids[:num_prompt], ids[num_prompt:]
    shown = text_after(tokenizer, params, prompt, output)
    offsets = TextOffsets(tokenizer, params, prompt)
    found = [offsets.push(token_id) for token_id in output]
    wanted = [characters_before(tokenizer, ids, num_prompt + number, shown) for number in range(len(output))]
    assert found == wanted, (shown, [tokenizer.tokens.bytes_of(token_id) for token_id in output])


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("is_given", [True, False], ids=["text", "token ids"])
@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_an_echoed_prompt_count_special_tokens_that_it_writes(kind, is_given, skips, root):
    """A text is echoed as given: the token that the tokenizer puts before it has no length."""
    tokenizer = loaded(kind, root)
    begin = min(tokenizer.special_token_ids)
    for text in TEXTS:
        ids = [begin, *tokenizer.encode(text, add_special_tokens=False)]
        params = SamplingParams(skip_special_tokens=skips)
        echo = echoed_text(tokenizer, text if is_given else tuple(ids), tuple(ids), params)
        offsets = TextOffsets(tokenizer, params, text=echo)
        for token_id, at in zip(ids, [offsets.push(token_id) for token_id in ids], strict=True):
            written = tokenizer.tokens.bytes_of(token_id)
            if token_id != begin and token_id not in tokenizer.fallback_bytes and is_whole(written):
                token = written.decode()
                assert echo[at:].startswith((token, token.removeprefix(" "))), (at, token, echo)
        assert offsets.push(begin) == len(echo)


def text_after(tokenizer: Tokenizer, params: SamplingParams, prompt: list[int], output: list[int]) -> str:
    from holdfast.router.text.text_stream import TextStream

    stream = TextStream(tokenizer, params, prompt)
    return stream.push(output).text + stream.finish()


def characters_before(tokenizer: Tokenizer, ids: list[int], number: int, shown: str) -> int:
    """By the bytes from the end of the text: what is left of its characters before the token."""
    rest = b"".join(map(tokenizer.tokens.bytes_of, ids[number:]))
    while rest and 0x80 <= rest[0] < 0xC0:  # they belong to the character before
        rest = rest[1:]
        if rest and not 0x80 <= rest[0] < 0xC0:
            return max(0, len(shown) - len(rest.decode()) - 1)
    return max(0, len(shown) - len(rest.decode()) - (not rest))


def is_whole(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
