import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from tokenizers import AddedToken

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer, TooManyTokensError
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from tests.router import sample_tokenizers as sample

TEXTS = ["the quick fox", " the  fox ", "naïve 日本 👩‍👩‍👧 \n", "", "the<s>fox</s>"]
KINDS = [sample.byte_level, sample.byte_fallback, sample.metaspace]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sample.write(tmp_path, sample.byte_level(), chat_template="{{ messages }}")
    return tmp_path


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_agrees_with_transformers(make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    sample.write(tmp_path, make(), clean_up_tokenization_spaces=False)
    ours, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


def test_loads_without_transformers(folder: Path) -> None:
    import subprocess
    import sys

    program = "import sys; from holdfast.router.text.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]); "
    program += "print({'transformers', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_reads_what_the_folder_says(folder: Path) -> None:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("fox")[0] == 0


def test_a_template_file_outranks_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(str(folder)).chat_template == "from the file"


def test_takes_the_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    sample.write(tmp_path, sample.byte_level(), chat_template=templates)
    assert Tokenizer.load(str(tmp_path)).chat_template == "plain"


def test_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    sample.write(tmp_path, sample.byte_level(), eos_token={"content": "</s>", "lstrip": False})
    assert Tokenizer.load(str(tmp_path)).eos_token_id == 1


def test_end_token_falls_back_to_generation_config(tmp_path: Path) -> None:
    sample.write(tmp_path, sample.byte_level(), eos_token=None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert Tokenizer.load(str(tmp_path)).eos_token_id == 2


def test_ignores_truncation_and_padding_in_the_file(tmp_path: Path) -> None:
    fast = sample.byte_level()
    fast.enable_truncation(max_length=3)
    fast.enable_padding(length=64)
    sample.write(tmp_path, fast)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert len(tokenizer.encode("fox")) < 5


def test_ids_without_a_token_decode_to_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.load(str(folder))
    ids = tokenizer.encode("fox")
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 2**40]) == "fox"


def test_refuses_text_that_is_not_unicode(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        Tokenizer.load(str(folder)).encode("half \ud83d")


def test_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        Tokenizer.load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_names_a_broken_file(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ConfigurationError, match=name):
        Tokenizer.load(str(folder))


def test_says_what_a_folder_without_a_tokenizer_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_falls_back_to_transformers_for_other_formats(tmp_path: Path) -> None:
    _write_wordpiece(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("the fox", add_special_tokens=False)) == "the fox"
    assert tokenizer.special_token_ids


def _write_wordpiece(folder: Path) -> None:
    """A vocabulary that only transformers can read: there is no tokenizer.json."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


LONG = "The quick brown fox, 42 times: \u6f22\u5b57 \U0001f600 caf\u00e9\n\n  x = [1, 2];" * 500
"""More than a thousand characters: these are encoded and decoded in another way."""


def test_long_texts_have_the_tokens_of_short_ones():
    tokenizer = Tokenizer.load(str(bundled_path(BUNDLED)))
    library = tokenizer._codec._tokenizer
    for text in (LONG, LONG[:1024], LONG[:1023], " " * 5000, "a" * 3000 + "\n"):
        for adds in (False, True):
            ids = tokenizer.encode(text, adds)
            assert ids == library.encode(text, add_special_tokens=adds).ids
            for skips in (False, True):
                assert tokenizer.decode(ids, skips) == library.decode(ids, skip_special_tokens=skips)


def longest_gap(work: Callable[[], object]) -> float:
    """The longest time in which another thread of Python did nothing, as a part of the time that the work took."""
    gaps, is_over = [0.0], Event()

    def other() -> None:
        last_s = time.perf_counter()
        while not is_over.is_set():
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    thread = Thread(target=other)
    thread.start()
    began_s = time.perf_counter()
    work()
    taken_s = time.perf_counter() - began_s
    is_over.set()
    thread.join()
    return max(gaps) / taken_s


@pytest.mark.parametrize("num_words", [10, 2000])
def test_more_tokens_than_asked_for_are_counted_and_not_kept(num_words: int):
    tokenizer = Tokenizer.load(str(bundled_path(BUNDLED)))
    text = "word " * num_words
    num_tokens = len(tokenizer.encode(text))
    assert tokenizer.encode(text, most=num_tokens) == tokenizer.encode(text)
    with pytest.raises(TooManyTokensError) as raised:
        tokenizer.encode(text, most=num_tokens - 1)
    assert raised.value.num_tokens == num_tokens
    assert all("encoding" not in frame.frame.f_locals for frame in raised.traceback), "its memory lives with the error"


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded():
    """Of three tries the best, since the machine may be busy; a call that holds Python's lock is at 1 in all."""
    tokenizer = Tokenizer.load(str(bundled_path(BUNDLED)))
    text = "word and other words, " * 12_000
    ids = tokenizer.encode(text)
    assert min(longest_gap(lambda: tokenizer.encode(text)) for _ in range(3)) < 0.6
    assert min(longest_gap(lambda: tokenizer.decode(ids)) for _ in range(3)) < 0.6


def added(**special: bool) -> dict[str, object]:
    return {str(300 + i): {"content": f"<{name}>", "special": is_so} for i, (name, is_so) in enumerate(special.items())}


@pytest.mark.parametrize(
    ("config", "generation", "text"),
    [
        ({}, {}, "a<end>b<x>c"),
        ({"added_tokens_decoder": added(end=True, x=False)}, {}, "ab<x>c"),
        ({"eos_token": "<end>"}, {}, "ab<x>c"),
        ({"eos_token": {"content": "<end>"}, "additional_special_tokens": ["<x>"]}, {}, "abc"),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {}, "a<end>bc"),
        ({}, {"eos_token_id": ["<end>", "<x>"]}, "abc"),
        ({}, {"eos_token_id": "<x>"}, "a<end>bc"),
        ({}, {"eos_token_id": "c"}, "a<end>b<x>c"),
        ({"eos_token": "<none>", "extra_special_tokens": 7}, {}, "a<end>b<x>c"),
    ],
)
def test_tokens_are_special_that_the_configuration_calls_so(config, generation, text, tmp_path: Path):
    """An ordinary token that ends outputs is a text elsewhere."""
    fast = sample.byte_level()
    fast.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<end>", "<x>")])
    sample.write(tmp_path / "model", fast)
    ids_of = lambda value: [*map(ids_of, value)] if isinstance(value, list) else fast.token_to_id(value)  # noqa: E731
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    ends = {name: ids_of(value) for name, value in generation.items()}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(ends))
    tokenizer = Tokenizer.load(str(tmp_path / "model"))
    token_ids = tokenizer.encode("a<end>b<x>c", add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "a<end>b<x>c"
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(token_ids) + stream.finish() == text


def test_the_other_templates_of_a_folder_have_names(tmp_path: Path):
    fast = sample.byte_level()
    sample.write(tmp_path / "model", fast)
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]})
    )
    named = Tokenizer.load(str(tmp_path / "model"))
    assert (named.chat_template, named.template_of(has_tools=True)) == ("d", "t")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/rag.jinja").write_text("r")
    (tmp_path / "model/chat_template.jinja").write_text("file")
    files = Tokenizer.load(str(tmp_path / "model"))
    assert files.chat_templates == {"default": "file", "rag": "r"}
    assert (files.template_of(has_tools=True), files.template_of(has_tools=True, name="rag")) == ("file", "r")
    assert files.with_chat_template("given").chat_templates == {"default": "given"}
    with pytest.raises(InvalidRequestError, match="default, rag"):
        files.template_of(name="tool_use")


@pytest.mark.parametrize(
    "text", ["The quick brown fox jumps over the lazy dog", "héllo wörld 漢字 😀😀 x", "aaaa  \n\n bbbb", ""]
)
def test_the_beginning_of_a_text_has_no_more_tokens_than_are_asked_for(text):
    """Cut behind a token's last whole character, as offsets tell; a text that fits is left alone."""
    tokenizer = Tokenizer.load(str(bundled_path("demo")))
    whole = tokenizer.encode(text, False)
    for most in range(len(whole) + 2):
        found = tokenizer.beginning(text, most)
        assert text.startswith(found)
        assert len(tokenizer.encode(found, False)) <= most
        assert (found == text) == (len(whole) <= most)
        if text.isascii() and most < len(whole):
            assert found == tokenizer.decode(whole[:most])
