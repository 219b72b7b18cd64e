import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from holdfast.router.text.tokenizer import Tokenizer
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


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded():
    """Of three tries the best, since the machine may be busy; a call that holds Python's lock is at 1 in all."""
    tokenizer = Tokenizer.load(str(bundled_path(BUNDLED)))
    text = "word and other words, " * 12_000
    ids = tokenizer.encode(text)
    assert min(longest_gap(lambda: tokenizer.encode(text)) for _ in range(3)) < 0.6
    assert min(longest_gap(lambda: tokenizer.decode(ids)) for _ in range(3)) < 0.6
