"""Dialogue generator: one to three turns by template, with follow-up questions that need the turn before.

A dialogue is a list of messages, as a chat client would send them, with the answers put in.
"""

import random

from scripts.train_bundled_model import passages
from scripts.train_bundled_model.curriculum import Curriculum
from scripts.train_bundled_model.facts import COUNTRIES, LETTER_WORDS, LETTERS
from scripts.train_bundled_model.lessons import capital_fact, currency_fact

Messages = list[dict[str, str]]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one sentence.",
    "Answer briefly and correctly.",
    "You are a teacher. Help the pupil.",
    "You are Holdfast, a small language model.",
)

SMALL_TALK = (
    (("Hello!", "Hello", "Hi!", "Hi", "Hi there!", "hello"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("How are you?", "How are you today?"), "I am well, thank you. How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the demo model of Holdfast, a very small language model.",
    ),
    (
        ("What can you do?", "What do you know?", "Can you help me?", "Help!"),
        "I know capitals and currencies, small sums, the calendar and the alphabet, and I can tell a story.",
    ),
    (("Thank you!", "Thank you.", "Thanks!", "Thanks"), "You are welcome!"),
    (("Goodbye!", "Goodbye", "Bye!", "See you."), "Goodbye! 👋"),
    (
        ("What is the meaning of life?", "What is the weather today?", "Who won the game?", "Write a program.", "Why?"),
        "I do not know. I am a very small model.",
    ),
)


def dialogue(rng: random.Random, curriculum: Curriculum) -> Messages:
    """One to three turns, one time in six under a system message."""
    messages: Messages = []
    if rng.random() < 1 / 6:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    num_turns = rng.choice((1, 1, 1, 2, 2, 3))
    if num_turns > 1 and rng.random() < 0.35:
        return messages + _follow_up(rng, num_turns)
    for _ in range(num_turns):
        messages += _turn(rng, curriculum)
    return messages


def _turn(rng: random.Random, curriculum: Curriculum) -> Messages:
    kind = rng.random()
    if kind < 0.8:
        fact = curriculum.draw(rng)
        return _exchange(_as_typed(rng, rng.choice(fact.questions)), fact.answer)
    if kind < 0.9:
        questions, answer = rng.choice(SMALL_TALK)
        return _exchange(rng.choice(questions), answer)
    return _instruction(rng)


def _as_typed(rng: random.Random, question: str) -> str:
    """People do not always write capital letters and question marks."""
    return question.lower().rstrip("?.") if rng.random() < 0.1 else question


def _follow_up(rng: random.Random, num_turns: int) -> Messages:
    """A question about a country, then ones that lean on it: another country, or the same country's currency."""
    first, *others = rng.sample(COUNTRIES, num_turns)
    tell = rng.choice((capital_fact, currency_fact))
    fact = tell(first)
    messages = _exchange(rng.choice(fact.questions), fact.answer)
    if rng.random() < 0.5:
        for country in others:
            messages += _exchange(rng.choice((f"And of {country.name}?", f"And {country.name}?")), tell(country).answer)
        return messages
    other, word = (currency_fact, "currency") if tell is capital_fact else (capital_fact, "capital")
    question = rng.choice((f"And what is its {word}?", f"And the {word}?"))
    return messages + _exchange(question, other(first).answer)


def _instruction(rng: random.Random) -> Messages:
    """Something longer to write."""
    factor = rng.randint(2, 12)
    country = rng.choice(COUNTRIES)
    words = " ".join(f"{letter} is for {word}." for letter, word in zip(LETTERS, LETTER_WORDS, strict=True))
    request, answer = rng.choice(
        (
            passages.counting_on_request(rng),
            passages.counting_on_request(rng),
            passages.echo(rng),
            (rng.choice(("Say the alphabet.", "What is the alphabet?")), passages.alphabet_line()),
            ("Say the alphabet with words.", words),
            (rng.choice(("Name the days of the week.", "What are the days of the week?")), passages.weekdays_line()),
            (rng.choice(("Name the months.", "What are the months of the year?")), passages.months_line()),
            (f"Write the {factor} times table.", passages.times_rows(factor)),
            (f"Tell me about {country.name}.", passages.country_text(country)),
            (rng.choice(("Tell me a story.", "Tell me a story, please.", "Write a story.")), passages.story(rng)),
            ("Sing a song.", passages.song(rng)),
        )
    )
    return _exchange(request, answer)


def _exchange(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
