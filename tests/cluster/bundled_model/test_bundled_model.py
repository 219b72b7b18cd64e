"""The shipped model folders: that they are small, belong to the corpus, and know what they were taught."""

import json
import re
from collections import Counter

import pytest
from safetensors import safe_open

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import UnknownModelError
from scripts.train_bundled_model import corpus
from scripts.train_bundled_model.corpus import documents
from scripts.train_bundled_model.facts import ANIMALS, COUNTRIES, LETTER_WORDS, LETTERS, number_in_words
from scripts.train_bundled_model.lessons import sums

NAMES = ["demo", "demo-draft"]
MAX_BYTES = 12 * 2**20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(bundled_path("demo")))


def score_of(name: str):
    """In one exam: all of them would take ten times as long."""
    from scripts.train_bundled_model.evaluate import evaluate, exams

    (score,) = evaluate(bundled_path("demo"), [exam for exam in exams() if exam.name == name])
    return score


def test_the_folders_are_small_together() -> None:
    sizes = [path.stat().st_size for name in NAMES for path in bundled_path(name).iterdir()]
    assert sum(sizes) <= MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_an_ordinary_one(name: str) -> None:
    files = {path.name for path in bundled_path(name).iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((bundled_path(name) / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == ("llama", "bfloat16", True)
    assert config["vocab_size"] % 64 == 0
    assert config["intermediate_size"] // 2 % 64 == 0


def test_draft_and_model_share_their_tokenizer() -> None:
    ours, drafts = ((bundled_path(name) / "tokenizer.json").read_bytes() for name in NAMES)
    assert ours == drafts


def test_other_names_are_refused() -> None:
    with pytest.raises(UnknownModelError, match="demo-draft"):
        bundled_path("demo2")


def test_the_models_were_trained_on_this_corpus() -> None:
    """If this fails, the corpus was changed: train again with `python -m scripts.train_bundled_model.train`."""
    digest = corpus.digest(documents())
    for name in NAMES:
        with safe_open(bundled_path(name) / "model.safetensors", framework="np") as weights:
            assert weights.metadata() == {"format": "pt", "corpus_sha256": digest}


def test_the_corpus_is_a_function_of_its_seed() -> None:
    first = list(documents(500))
    assert list(documents(500)) == first
    assert list(documents(400)) == first[:400]
    assert list(documents(500, seed=1)) != first


def test_the_tables_hold_what_they_should() -> None:
    assert len(COUNTRIES) == 50
    assert max(Counter(country.capital for country in COUNTRIES).values()) == 1
    assert all(word.startswith(letter.lower()) for letter, word in zip(LETTERS, LETTER_WORDS, strict=True))
    assert len({animal.emoji for animal in ANIMALS}) == len(ANIMALS)
    assert [number_in_words(number) for number in (0, 13, 40, 99, 100)] == [
        "zero",
        "thirteen",
        "forty",
        "ninety-nine",
        "one hundred",
    ]


def test_the_sums_of_the_corpus_are_right() -> None:
    for fact in sums():
        a, b, total = map(int, re.findall(r"\d+", fact.statements[0]))
        assert a + b == total


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in ("The capital of Brazil is Brasília.", "12 + 34 = 46", "naïve 日本 👩‍👩‍👧\r\n\t", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_takes_turns_and_a_system_message(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": " Bye \n"},
    ]
    text = render_chat(tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens)
    assert text == (
        "<|begin_of_text|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
        "<|user|>Bye<|end|><|assistant|>"
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert sum(token_id in tokenizer.special_token_ids for token_id in token_ids) == 10


@pytest.mark.parametrize(
    "exam", ["The capital of ... is", "The capital city of ... is", "Q: ... A:", "What is the capital of ...?"]
)
def test_knows_its_capitals_and_stops_after_them(exam: str) -> None:
    score = score_of(exam)
    assert score.num_right >= 45
    assert score.num_ended >= 45


def test_knows_currencies() -> None:
    assert score_of("The currency of ... is the").num_right >= 40


@pytest.mark.parametrize("exam", ["a + b =", "What is a + b?"])
def test_adds_small_numbers(exam: str) -> None:
    score = score_of(exam)
    assert score.num_right >= 0.7 * score.num_questions


def test_knows_the_days_and_the_alphabet() -> None:
    assert score_of("the day after ...").num_right == 6
    assert score_of("the letter after ...").num_right >= 20


@pytest.mark.slow
def test_answers_at_length() -> None:
    assert score_of("long answers").num_ended >= 4


def test_france() -> None:
    """The example of the documentation, by transformers alone."""
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(bundled_path("demo")))
    (output,) = generate("The capital of France is", max_new_tokens=8, do_sample=False)
    assert output["generated_text"] == "The capital of France is Paris."
    (chat,) = generate(
        [{"role": "user", "content": "What is the capital of Japan?"}], max_new_tokens=24, do_sample=False
    )
    assert chat["generated_text"][-1] == {"role": "assistant", "content": "The capital of Japan is Tokyo."}
