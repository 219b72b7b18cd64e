"""Curriculum of the bundled models: the topics, and how often each comes up in the corpus."""

import random

from scripts.train_bundled_model import lessons
from scripts.train_bundled_model.facts import COUNTRIES
from scripts.train_bundled_model.lessons import Fact


class Curriculum:
    """Topics with their weights. A topic of few facts, such as capitals, is repeated more often fact by fact."""

    def __init__(self) -> None:
        topics = (
            (18, [lessons.capital_fact(country) for country in COUNTRIES]),
            (14, list(lessons.countries())),
            (26, list(lessons.sums())),
            (9, list(lessons.sums_in_words())),
            (4, list(lessons.differences())),
            (4, list(lessons.products())),
            (14, list(lessons.calendar())),
            (12, list(lessons.alphabet())),
            (12, list(lessons.everyday())),
            (3, list(lessons.number_words())),
        )
        self._weights = [weight for weight, _ in topics]
        self._topics = [facts for _, facts in topics]

    def draw(self, rng: random.Random) -> Fact:
        """A fact: first a topic by its weight, then one of its facts."""
        (topic,) = rng.choices(self._topics, self._weights)
        return rng.choice(topic)
