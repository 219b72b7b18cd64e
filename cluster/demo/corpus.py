"""The text that the bundled model is trained on, written from a seed: facts, lists of them, dialogues, long passages.

`python -m cluster.demo.corpus` prints some of it. No tokens here: `train.py` turns documents into them.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Final

from cluster.demo import lessons
from cluster.demo.chats import DrawFact, Messages, dialogue
from cluster.demo.facts import COUNTRIES
from cluster.demo.lessons import Fact
from cluster.demo.passages import PASSAGES

SEED: Final = 20
NUM_DOCUMENTS: Final = 100_000

Document = str | Messages
"""A text, or the messages of a dialogue, which the chat template turns into text."""


def documents(num_documents: int = NUM_DOCUMENTS, seed: int = SEED) -> Iterator[Document]:
    """The corpus: the same documents for the same seed, on every machine. A longer corpus begins with a shorter one."""
    rng = random.Random(seed)
    draw_fact = DrawFact(_topics())
    for _ in range(num_documents):
        (write,) = rng.choices(_WRITERS, _SHARES)
        yield write(rng, draw_fact)


def digest(corpus: Iterable[Document]) -> str:
    """SHA-256 of the documents in order. The model folders carry it: it says which corpus they were trained on."""
    sha = hashlib.sha256()
    for document in corpus:
        sha.update(repr(document).encode() + b"\n")
    return sha.hexdigest()


def _topics() -> list[tuple[float, list[Fact]]]:
    """What there is to know, and how often each topic comes up."""
    return [
        (22, [lessons.capital_fact(country) for country in COUNTRIES]),
        (16, list(lessons.countries())),
        (30, list(lessons.sums())),
        (6, list(lessons.sums_in_words())),
        (5, list(lessons.differences())),
        (5, list(lessons.products())),
        (10, list(lessons.calendar())),
        (8, list(lessons.alphabet())),
        (12, list(lessons.everyday())),
    ]


def _statement(rng: random.Random, draw_fact: DrawFact) -> Document:
    """One sentence and no more: a document that teaches when to stop."""
    return rng.choice(draw_fact(rng).statements)


def _related(rng: random.Random, draw_fact: DrawFact) -> Document:
    """Several sentences in a row."""
    return " ".join(rng.choice(draw_fact(rng).statements) for _ in range(rng.randint(2, 4)))


def _question_and_answer(rng: random.Random, draw_fact: DrawFact) -> Document:
    fact = draw_fact(rng)
    form = rng.choice(("{} {}", "Question: {}\nAnswer: {}", "Q: {}\nA: {}"))
    return form.format(rng.choice(fact.questions), fact.answer)


def _quiz(rng: random.Random, draw_fact: DrawFact) -> Document:
    """Three to six questions with the shortest answers."""
    facts = [draw_fact(rng) for _ in range(rng.randint(3, 6))]
    return "\n".join(["Quiz", *(f"{rng.choice(fact.questions)} - {fact.short_answer}" for fact in facts)])


def _dialogue(rng: random.Random, draw_fact: DrawFact) -> Document:
    return dialogue(rng, draw_fact)


def _passage(rng: random.Random, draw_fact: DrawFact) -> Document:
    return rng.choice(PASSAGES)(rng)


_WRITERS: Final = (_statement, _related, _question_and_answer, _quiz, _dialogue, _passage)
_SHARES: Final = (32, 12, 14, 6, 28, 8)


def main() -> None:
    for document in documents(40):
        print(document, end="\n\n")


if __name__ == "__main__":
    main()
