"""Evaluation of the bundled models: greedy answers by plain transformers, compared with the facts they were taught.

An answer is right when the output begins with it, and ended when nothing follows but the end of the output.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train_bundled_model import lessons, passages
from scripts.train_bundled_model.facts import COUNTRIES, LETTERS, WEEKDAYS, Country, number_in_words

MAX_SUM: Final = 40
NUM_SUMS: Final = 100
BATCH_SIZE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Prompts and the outputs that should follow them."""

    name: str
    questions: tuple[tuple[str, str], ...]
    is_chat: bool = False
    max_tokens: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How an exam went."""

    name: str
    num_questions: int
    num_right: int
    num_ended: int
    """Right, and then the output ended by itself."""


def evaluate(folder: Path, asked: Iterable[Exam] | None = None) -> list[Score]:
    """All exams, or those asked for, on the model in `folder`, in the checkpoint's dtype on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto").eval()
    return [_mark(exam, _answers(model, tokenizer, exam)) for exam in (exams() if asked is None else asked)]


def print_scores(title: str, scores: Sequence[Score], console: Console) -> None:
    table = Table("exam", "questions", "right", "ended", title=title)
    for score in scores:
        table.add_row(score.name, *map(str, (score.num_questions, score.num_right, score.num_ended)))
    console.print(table)


def exams() -> Iterator[Exam]:
    yield _countries("The capital of ... is", lambda c: (f"The capital of {c.name} is", f" {c.capital}"))
    yield _countries("The capital city of ... is", lambda c: (f"The capital city of {c.name} is", f" {c.capital}"))
    yield _countries("Q: ... A:", lambda c: (_asked(c), f" The capital of {c.name} is {c.capital}"))
    yield _countries("What is the capital of ...?", _chat_question, is_chat=True)
    yield _countries("The currency of ... is the", lambda c: (f"The currency of {c.name} is the", f" {c.currency}"))
    sums = _sums()
    yield Exam(name="a + b =", questions=tuple((f"{a} + {b} =", f" {a + b}.") for a, b in sums))
    chat_sums = tuple((f"What is {a} + {b}?", f"{a} + {b} = {a + b}.") for a, b in sums)
    yield Exam(name="What is a + b?", questions=chat_sums, is_chat=True)
    words = tuple((f"{one} plus {other} is", f" {total}.") for one, other, total in _sums_in_words())
    yield Exam(name="one plus two is", questions=words)
    yield Exam(name="the day after ...", questions=tuple(_successors("day", WEEKDAYS)))
    yield Exam(name="the letter after ...", questions=tuple(_successors("letter", LETTERS)))
    yield Exam(name="long answers", questions=_LONG, is_chat=True, max_tokens=360)


_LONG: Final = (
    ("Say the alphabet.", passages.alphabet_line()),
    ("Name the days of the week.", passages.weekdays_line()),
    ("Name the months.", passages.months_line()),
    ("Count to 10.", passages.count_up(1, 10)),
    ("Count from 1 to 20.", passages.count_up(1, 20)),
    ("Count from 1 to 100.", passages.count_up(1, 100)),
    ("Write the 7 times table.", passages.times_rows(7)),
)


def _countries(name: str, question: Callable[[Country], tuple[str, str]], is_chat: bool = False) -> Exam:
    return Exam(name=name, questions=tuple(map(question, COUNTRIES)), is_chat=is_chat)


def _asked(country: Country) -> str:
    return f"Q: What is the capital of {country.name}?\nA:"


def _chat_question(country: Country) -> tuple[str, str]:
    return f"What is the capital of {country.name}?", lessons.capital_fact(country).answer


def _sums() -> list[tuple[int, int]]:
    """A fixed sample of the sums below 40."""
    pairs = [(a, total - a) for total in range(MAX_SUM) for a in range(total + 1)]
    return random.Random(0).sample(pairs, NUM_SUMS)


def _sums_in_words() -> Iterator[tuple[str, str, str]]:
    for a in range(1, 10):
        for b in range(1, 10):
            yield number_in_words(a).capitalize(), number_in_words(b), number_in_words(a + b)


def _successors(kind: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, after in pairwise(names):
        yield f"The {kind} after {name} is", f" {after}."


def _mark(exam: Exam, answers: Sequence[str]) -> Score:
    pairs = [(answer, expected) for answer, (_, expected) in zip(answers, exam.questions, strict=True)]
    right = [(answer, expected) for answer, expected in pairs if answer.startswith(expected)]
    ended = [
        answer for answer, expected in right if answer.removeprefix(expected).removeprefix(".").startswith("<|end")
    ]
    return Score(name=exam.name, num_questions=len(pairs), num_right=len(right), num_ended=len(ended))


def _answers(model: Any, tokenizer: Any, exam: Exam) -> list[str]:
    """Greedy outputs with their special tokens, in the order of the questions."""
    prompts = [question for question, _ in exam.questions]
    answers: list[str] = []
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = _encode(tokenizer, prompts[first : first + BATCH_SIZE], exam.is_chat)
        with torch.inference_mode():
            output = model.generate(**batch, max_new_tokens=exam.max_tokens, do_sample=False)
        answers += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
    return answers


def _encode(tokenizer: Any, prompts: Sequence[str], is_chat: bool) -> Any:
    if not is_chat:
        return tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
