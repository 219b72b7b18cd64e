"""Sentences for the facts of `facts.py`, each in several phrasings: statements, questions, answers.

Deterministic: `corpus.py` draws from these lists.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.train_bundled_model.facts import (
    ANIMALS,
    COLOURS,
    COUNTRIES,
    GREEK,
    LETTER_WORDS,
    LETTERS,
    MIXTURES,
    MONTHS,
    OPPOSITES,
    ORDINALS,
    SPANS,
    WEEKDAYS,
    Country,
    number_in_words,
)

MAX_SUM = 50
MAX_FACTOR = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing to know. `statements[0]` is the full answer to every question; `short_answer` is its heart."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    short_answer: str

    @property
    def answer(self) -> str:
        return self.statements[0]


def sentence(text: str) -> str:
    """The text with a capital first letter and a full stop."""
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital_fact(country: Country) -> Fact:
    name, capital = country.name, country.capital
    return Fact(
        statements=(
            sentence(f"the capital of {name} is {capital}"),
            sentence(f"{capital} is the capital of {name}"),
            sentence(f"the capital city of {name} is {capital}"),
            sentence(f"{_possessive(name)} capital is {capital}"),
            sentence(f"in {name}, the capital city is {capital}"),
        ),
        questions=(
            f"What is the capital of {name}?",
            f"What is the capital city of {name}?",
            f"Which city is the capital of {name}?",
            f"Tell me the capital of {name}.",
            f"Name the capital of {name}.",
        ),
        short_answer=sentence(capital),
    )


def currency_fact(country: Country) -> Fact:
    name, currency = country.name, country.currency
    return Fact(
        statements=(
            sentence(f"the currency of {name} is the {currency}"),
            sentence(f"people in {name} pay with the {currency}"),
            sentence(f"{_possessive(name)} currency is the {currency}"),
        ),
        questions=(
            f"What is the currency of {name}?",
            f"Which currency do people use in {name}?",
            f"Tell me the currency of {name}.",
        ),
        short_answer=sentence(f"the {currency}"),
    )


def continent_fact(country: Country) -> Fact:
    name, continent = country.name, country.continent
    return Fact(
        statements=(sentence(f"{name} is in {continent}"), sentence(f"{name} is part of {continent}")),
        questions=(f"Where is {name}?", f"On which continent is {name}?"),
        short_answer=sentence(continent),
    )


def country_of_capital_fact(country: Country) -> Fact:
    return Fact(
        statements=(sentence(f"{country.capital} is the capital of {country.name}"),),
        questions=(
            f"Which country has the capital {country.capital}?",
            f"Of which country is {country.capital} the capital?",
        ),
        short_answer=sentence(country.name),
    )


def sums() -> Iterator[Fact]:
    for total in range(MAX_SUM + 1):
        for a in range(total + 1):
            yield _arithmetic(a, "+", "plus", total - a, total)


def sums_in_words() -> Iterator[Fact]:
    for a in range(11):
        for b in range(11):
            one, other, total = map(number_in_words, (a, b, a + b))
            yield Fact(
                statements=(sentence(f"{one} plus {other} is {total}"), sentence(f"{one} plus {other} equals {total}")),
                questions=(f"What is {one} plus {other}?", f"How much is {one} plus {other}?"),
                short_answer=sentence(total),
            )


def differences() -> Iterator[Fact]:
    for a in range(MAX_SUM // 2 + 1):
        for b in range(a + 1):
            yield _arithmetic(a, "-", "minus", b, a - b)


def products() -> Iterator[Fact]:
    for a in range(1, MAX_FACTOR + 1):
        for b in range(1, MAX_FACTOR + 1):
            yield _arithmetic(a, "x", "times", b, a * b)


def calendar() -> Iterator[Fact]:
    yield from _circle("day", WEEKDAYS)
    yield from _circle("month", [name for name, _ in MONTHS])
    for index, (month, num_days) in enumerate(MONTHS):
        yield Fact(
            statements=(f"{month} has {num_days} days.", f"There are {num_days} days in {month}."),
            questions=(f"How many days does {month} have?", f"How many days are in {month}?"),
            short_answer=f"{num_days}.",
        )
        yield _ordinal(ORDINALS[index], "month of the year", month)
    for span, count, unit in SPANS:
        yield Fact(
            statements=(sentence(f"{span} has {count} {unit}"), f"There are {count} {unit} in {span}."),
            questions=(f"How many {unit} are in {span}?", f"How many {unit} does {span} have?"),
            short_answer=f"{count}.",
        )


def alphabet() -> Iterator[Fact]:
    for index, letter in enumerate(LETTERS):
        yield _ordinal(ORDINALS[index], "letter of the alphabet", letter)
        word = LETTER_WORDS[index]
        yield Fact(
            statements=(f"{letter} is for {word}.",),
            questions=(f"What is {letter} for?", f"Tell me a word with {letter}."),
            short_answer=sentence(word),
        )
    for before, after in pairwise(LETTERS):
        yield _neighbour("letter", "after", before, after)
        yield _neighbour("letter", "before", after, before)
    for name, sign in GREEK:
        yield Fact(
            statements=(f"The Greek letter {name} is written {sign}.",),
            questions=(f"How is the Greek letter {name} written?", f"Write the Greek letter {name}."),
            short_answer=sentence(sign),
        )


def everyday() -> Iterator[Fact]:
    """Opposites, colours and animals."""
    for one, other in OPPOSITES:
        yield _opposite(one, other)
        yield _opposite(other, one)
    yield from map(_colour, COLOURS)
    for one, other, mixed in MIXTURES:
        yield Fact(
            statements=(sentence(f"{one} and {other} make {mixed}"), f"If you mix {one} and {other}, you get {mixed}."),
            questions=(f"What do {one} and {other} make?", f"What do you get if you mix {one} and {other}?"),
            short_answer=sentence(mixed),
        )
    yield from _animals()


def number_words() -> Iterator[Fact]:
    for number in range(101):
        word = number_in_words(number)
        yield Fact(
            statements=(sentence(f"{number} in words is {word}"), sentence(f"{word} is written {number}")),
            questions=(f"How do you write {number} in words?", f"What is {number} in words?"),
            short_answer=sentence(word),
        )


def countries() -> Iterator[Fact]:
    """Everything about countries but their capitals."""
    for country in COUNTRIES:
        yield currency_fact(country)
        yield continent_fact(country)
        yield country_of_capital_fact(country)


def _animals() -> Iterator[Fact]:
    for animal in ANIMALS:
        name = with_article(animal.name)
        young = with_article(animal.young)
        yield Fact(
            statements=(sentence(f"{name} {animal.voice}"),),
            questions=(f"What does {name} do?", f"What sound does {name} make?"),
            short_answer=sentence(f"it {animal.voice}"),
        )
        yield Fact(
            statements=(sentence(f"a young {animal.name} is called {young}"),),
            questions=(f"What is a young {animal.name} called?",),
            short_answer=sentence(young),
        )
        yield Fact(
            statements=(f"The emoji of {name} is {animal.emoji}.",),
            questions=(f"What is the emoji of {name}?", f"Show me {name}."),
            short_answer=sentence(animal.emoji),
        )


def _colour(row: tuple[str, str]) -> Fact:
    thing, colour = row
    return Fact(
        statements=(sentence(f"{thing} is {colour}"), f"The colour of {thing} is {colour}."),
        questions=(f"What colour is {thing}?", f"What is the colour of {thing}?"),
        short_answer=sentence(colour),
    )


def _opposite(one: str, other: str) -> Fact:
    return Fact(
        statements=(f"The opposite of {one} is {other}.",),
        questions=(f"What is the opposite of {one}?", f"Tell me the opposite of {one}."),
        short_answer=sentence(other),
    )


def _arithmetic(a: int, sign: str, word: str, b: int, result: int) -> Fact:
    return Fact(
        statements=(f"{a} {sign} {b} = {result}.", f"{a} {word} {b} is {result}.", f"{a} {word} {b} equals {result}."),
        questions=(f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"How much is {a} {sign} {b}?"),
        short_answer=f"{result}.",
    )


def _circle(kind: str, names: Sequence[str]) -> Iterator[Fact]:
    for index, name in enumerate(names):
        yield _neighbour(kind, "after", name, names[(index + 1) % len(names)])
        yield _neighbour(kind, "before", name, names[index - 1])


def _neighbour(kind: str, side: str, name: str, neighbour: str) -> Fact:
    return Fact(
        statements=(f"The {kind} {side} {name} is {neighbour}.", f"{neighbour} comes {side} {name}."),
        questions=(
            f"Which {kind} comes {side} {name}?",
            f"What {kind} is {side} {name}?",
            f"What comes {side} {name}?",
        ),
        short_answer=sentence(neighbour),
    )


def _ordinal(ordinal: str, of_what: str, name: str) -> Fact:
    return Fact(
        statements=(f"The {ordinal} {of_what} is {name}.", f"{name} is the {ordinal} {of_what}."),
        questions=(f"What is the {ordinal} {of_what}?", f"Which is the {ordinal} {of_what}?"),
        short_answer=sentence(name),
    )


def _possessive(name: str) -> str:
    return name + ("'" if name.endswith("s") else "'s")
