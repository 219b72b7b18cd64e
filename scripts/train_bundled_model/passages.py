"""Long passages by template, up to some 400 tokens: counting, tables, the alphabet, journeys, songs and stories.

They are repetitive on purpose: they teach a small model to be consistent over hundreds of tokens, and to end. Each
function draws from `rng` alone, so that a seed gives the same text everywhere.
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from scripts.train_bundled_model.facts import COUNTRIES, GREEK, LETTER_WORDS, LETTERS, MONTHS, WEEKDAYS, number_in_words
from scripts.train_bundled_model.lessons import MAX_SUM, sentence, with_article

_NAMES: Final = "Anna Ben Clara David Emma Felix Greta Henry Ida Jonas Lena Max Nora Oscar Paula Tom"
_ANIMALS: Final = "fox hen duck goat bear owl"
_MANNERS: Final = "little old brave clever quiet merry"
_GOODS: Final = "apples bread cheese flowers honey milk pears salt tea wool"
_FLYERS: Final = "birds bees owls ducks swans"
_PERCHES: Final = ("on the wall", "in the tree", "on the roof")
_TARGETS: Final = (5, 10, 10, 20, 20, 30, 50, 100)
_PLACES: Final = (
    "the old mill",
    "the green hill",
    "the dark wood",
    "the long river",
    "the red house",
    "the stone bridge",
)
_TREASURES: Final = ("a golden key", "a silver bell", "a warm coat")
_DEEDS: Final = (
    "planted a tree",
    "baked a cake",
    "wrote a letter",
    "painted a door",
    "read a book",
    "mended a chair",
    "walked to the river",
    "visited a friend",
    "sang a song",
    "washed the windows",
)


def counting(rng: random.Random) -> str:
    """Numbers upwards, sometimes with the request that fits them on the first line."""
    first, step = rng.choice(((1, 1), (1, 1), (1, 1), (0, 2), (0, 5), (0, 10)))
    last = rng.choice(_TARGETS) if step == 1 else 20 * step
    numbers = count_up(first, last, step)
    return rng.choice((numbers, f"{count_request(first, last, step)}\n{numbers}"))


def counting_on_request(rng: random.Random) -> tuple[str, str]:
    """A request to count, and the numbers."""
    last = rng.choice(_TARGETS)
    return rng.choice((count_request(1, last), f"Count to {last}.")), count_up(1, last)


def count_request(first: int, last: int, step: int = 1) -> str:
    by = "" if step == 1 else f" in steps of {step}"
    return f"Count from {first} to {last}{by}."


def count_up(first: int, last: int, step: int = 1) -> str:
    return ", ".join(map(str, range(first, last + 1, step))) + "."


def countdown(rng: random.Random) -> str:
    first = rng.choice((5, 10, 10, 20))
    return f"Count down from {first}.\n" + ", ".join(map(str, range(first, -1, -1))) + "."


def times_table(rng: random.Random) -> str:
    factor = rng.randint(1, 12)
    return f"The {factor} times table:\n" + times_rows(factor)


def times_rows(factor: int) -> str:
    return "\n".join(f"{row} x {factor} = {row * factor}" for row in range(1, 13))


def worksheet(rng: random.Random) -> str:
    """Sums in no order."""
    totals = [rng.randint(0, MAX_SUM) for _ in range(rng.randint(8, 20))]
    firsts = [rng.randint(0, total) for total in totals]
    rows = (f"{a} + {total - a} = {total}" for a, total in zip(firsts, totals, strict=True))
    return "Sums:\n" + "\n".join(rows)


def sums_of(rng: random.Random) -> str:
    """The sums of one number, in order."""
    first = rng.randint(0, 25)
    return f"Sums with {first}:\n" + "\n".join(f"{first} + {b} = {first + b}" for b in range(rng.randint(10, 25) + 1))


def alphabet_text(rng: random.Random) -> str:
    form = rng.randrange(5)
    if form == 0:
        return alphabet_line()
    if form == 1:
        pairs = zip(LETTERS, LETTER_WORDS, strict=True)
        return "The alphabet in words:\n" + "\n".join(f"{letter} is for {word}." for letter, word in pairs)
    if form == 2:
        return "The Greek alphabet: " + ", ".join(f"{name} {sign}" for name, sign in GREEK) + "."
    if form == 3:
        return "The alphabet in small letters: " + " ".join(LETTERS.lower()) + "."
    return f"The alphabet: {alphabet_line()}"


def alphabet_line() -> str:
    return ", ".join(LETTERS) + "."


def names_of_time(rng: random.Random) -> str:
    kind, line = rng.choice((("days of the week", weekdays_line()), ("months of the year", months_line())))
    return rng.choice((line, f"The {kind} are {line}"))


def weekdays_line() -> str:
    return ", ".join(WEEKDAYS[:-1]) + f" and {WEEKDAYS[-1]}."


def months_line() -> str:
    names = [name for name, _ in MONTHS]
    return ", ".join(names[:-1]) + f" and {names[-1]}."


def refrain(rng: random.Random) -> str:
    """The same few words again and again, line by line."""
    return "\n".join([_some_words(rng)] * rng.randint(3, 8))


def echo(rng: random.Random) -> tuple[str, str]:
    """A request to say some words, and the words."""
    words = _some_words(rng)
    return rng.choice((f"Say: {words}", f"Repeat after me: {words}")), words


def _some_words(rng: random.Random) -> str:
    words = [*_ANIMALS.split(), *_MANNERS.split(), *_GOODS.split(), *_NAMES.split(), *WEEKDAYS, *LETTERS]
    return " ".join(rng.choice(words) for _ in range(rng.randint(2, 10)))


def diary(rng: random.Random) -> str:
    """A week in the life of somebody, day by day."""
    name = rng.choice(_NAMES.split())
    lines = [f"A week with {name}."]
    for day in WEEKDAYS:
        if rng.random() < 0.5:
            lines.append(f"On {day}, {name} {rng.choice(_DEEDS)} and {rng.choice(_DEEDS)}.")
        else:
            lines.append(f"On {day}, {name} went to the market and bought {rng.choice(_GOODS.split())}.")
    return "\n".join([*lines, f"Then the week was over and {name} rested."])


def journey(rng: random.Random) -> str:
    """From country to country, with what there is to know of each."""
    name = rng.choice(_NAMES.split())
    stops = rng.sample(COUNTRIES, rng.randint(2, 6))
    lines = [f"{name} goes on a journey."]
    for number, stop in enumerate(stops):
        opening = "The journey begins in" if number == 0 else rng.choice(("Next comes", "Then follows"))
        lines.append(f"{opening} {stop.name}. " + country_text(stop))
    return "\n".join([*lines, f"Then {name} goes home."])


def country_text(country: tuple[str, str, str, str]) -> str:
    name, capital, currency, continent = country
    return " ".join(
        (
            sentence(f"the capital of {name} is {capital}"),
            sentence(f"people in {name} pay with the {currency}"),
            sentence(f"{name} is in {continent}"),
        )
    )


def song(rng: random.Random) -> str:
    """A counting song, verse by verse down to none."""
    flyer, place = rng.choice(_FLYERS.split()), rng.choice(_PERCHES)
    lines = []
    for number in range(rng.choice((5, 6, 8, 10)), 0, -1):
        noun = flyer if number > 1 else flyer[:-1]
        left = number_in_words(number - 1) if number > 1 else "no"
        rest = flyer if number != 2 else flyer[:-1]
        verb = "sits" if number == 1 else "sit"
        line = f"{number_in_words(number)} {noun} {verb} {place}. One flies away, and {left} {rest} stay"
        lines.append(sentence(line + ("s" if number == 2 else "")))
    return "\n".join(lines)


def story(rng: random.Random) -> str:
    """A tale of somebody who looks for something and meets others on the way; the company grows verse by verse."""
    animals = rng.sample(_ANIMALS.split(), rng.randint(2, 4))
    hero, treasure = animals[0], rng.choice(_TREASURES)
    places = rng.sample(_PLACES, len(animals))
    lines = [
        f"Once upon a time there was {_somebody(rng, hero)} who lived near {places[0]}.",
        f"One day the {hero} wanted to find {treasure}.",
    ]
    for number, friend in enumerate(animals[1:], start=1):
        company = _listed(animals[:number])
        lines += [
            f"At {places[number]} the {company} met {_somebody(rng, friend)}.",
            f'"What are you looking for?" asked the {friend}.',
            f'"We are looking for {treasure}," said the {hero}.'
            if number > 1
            else f'"I am looking for {treasure}," said the {hero}.',
            f'"Then I will come with you," said the {friend}.',
        ]
    lines += [
        f"So the {_listed(animals)} went on together, and under a tree they found {treasure}.",
        "They were happy and went home. The end.",
    ]
    return "\n".join(lines)


def _somebody(rng: random.Random, animal: str) -> str:
    return with_article(f"{rng.choice(_MANNERS.split())} {animal}")


def _listed(names: list[str]) -> str:
    """`fox`, `fox and the hen`, `fox, the hen and the duck`."""
    if len(names) == 1:
        return names[0]
    return ", the ".join(names[:-1]) + f" and the {names[-1]}"


PASSAGES: Final[Mapping[Callable[[random.Random], str], int]] = MappingProxyType(
    {
        counting: 3,
        countdown: 1,
        times_table: 2,
        worksheet: 1,
        sums_of: 1,
        alphabet_text: 2,
        names_of_time: 1,
        refrain: 3,
        diary: 1,
        journey: 2,
        song: 1,
        story: 5,
    }
)
"""The kinds of passages, and how often each comes up."""
