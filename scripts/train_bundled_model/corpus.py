"""Training corpus of the bundled models, written from a seed: facts, lists of them, dialogues, long passages.

`python -m scripts.train_bundled_model.corpus` prints some of it.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Final

from scripts.train_bundled_model.chats import Messages, dialogue
from scripts.train_bundled_model.curriculum import Curriculum
from scripts.train_bundled_model.passages import PASSAGES

SEED: Final = 20
NUM_DOCUMENTS: Final = 60_000

Document = str | Messages
"""A text, or the messages of a dialogue, which the chat template turns into text."""


def documents(num_documents: int = NUM_DOCUMENTS, seed: int = SEED) -> Iterator[Document]:
    """The corpus: the same documents for the same seed, on every machine. A longer corpus begins with a shorter one."""
    rng = random.Random(seed)
    curriculum = Curriculum()
    for _ in range(num_documents):
        (write,) = rng.choices(_WRITERS, _SHARES)
        yield write(rng, curriculum)


def digest(corpus: Iterable[Document]) -> str:
    """SHA-256 of the documents in order. The model folders carry it: it says which corpus they were trained on."""
    sha = hashlib.sha256()
    for document in corpus:
        sha.update(repr(document).encode() + b"\n")
    return sha.hexdigest()


def _statement(rng: random.Random, curriculum: Curriculum) -> Document:
    """One sentence and no more: a document that teaches when to stop."""
    return rng.choice(curriculum.draw(rng).statements)


def _related(rng: random.Random, curriculum: Curriculum) -> Document:
    """Several sentences in a row."""
    return " ".join(rng.choice(curriculum.draw(rng).statements) for _ in range(rng.randint(2, 4)))


def _question_and_answer(rng: random.Random, curriculum: Curriculum) -> Document:
    fact = curriculum.draw(rng)
    form = rng.choice(("{} {}", "Question: {}\nAnswer: {}", "Q: {}\nA: {}"))
    return form.format(rng.choice(fact.questions), fact.answer)


def _quiz(rng: random.Random, curriculum: Curriculum) -> Document:
    """Three to six questions with the shortest answers."""
    facts = [curriculum.draw(rng) for _ in range(rng.randint(3, 6))]
    return "\n".join(["Quiz", *(f"{rng.choice(fact.questions)} - {fact.short_answer}" for fact in facts)])


def _passage(rng: random.Random, curriculum: Curriculum) -> Document:
    (write,) = rng.choices(list(PASSAGES), list(PASSAGES.values()))
    return write(rng)


_WRITERS: Final = (_statement, _related, _question_and_answer, _quiz, dialogue, _passage)
_SHARES: Final = (30, 12, 14, 5, 29, 10)


def main() -> None:
    for document in documents(40):
        print(document, end="\n\n")


if __name__ == "__main__":
    main()
