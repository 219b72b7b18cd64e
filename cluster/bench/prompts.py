"""Prompt texts of a number of tokens, without the server's tokenizer: plain words, calibrated by the server's counts.

Two probes say how many tokens the server makes of a word, and how many its template adds. Prompts then have about the
right length, and reports say the exact one, as the server counted it. What may not live here: asking
(`calibration.py`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.bench.workload import Session

WORDS: Final = (
    "about", "above", "after", "again", "air", "all", "along", "also", "always", "and", "animal", "answer", "any",
    "are", "around", "ask", "back", "because", "been", "before", "began", "below", "better", "between", "big",
    "black", "boat", "book", "both", "bring", "build", "but", "call", "came", "can", "carry", "change", "city",
    "clear", "close", "cold", "color", "come", "could", "country", "cut", "dark", "day", "different", "door",
    "down", "draw", "early", "earth", "eat", "every", "eye", "face", "fall", "far", "father", "feel", "few",
    "find", "fire", "first", "fish", "five", "follow", "food", "foot", "for", "form", "four", "from", "full",
    "game", "garden", "gave", "get", "girl", "give", "go", "good", "great", "green", "ground", "group", "grow",
    "half", "hand", "hard", "have", "head", "hear", "help", "here", "high", "hold", "home", "horse", "hour",
    "house", "how", "hundred",
)  # fmt: skip
"""Common words, of one token each in most vocabularies."""

_NUM_CORPUS_WORDS: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the server counts: so many tokens for each word, and so many more for each prompt."""

    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0
    is_measured: bool = False

    @classmethod
    def of(cls, probes: Sequence[tuple[int, int]]) -> "Calibration":
        """From two probes as (words, tokens)."""
        (few_words, few_tokens), (many_words, many_tokens) = probes
        per_word = (many_tokens - few_tokens) / (many_words - few_words)
        if not per_word > 0:
            return cls()
        return cls(per_word, few_tokens - few_words * per_word, is_measured=True)

    def num_words(self, num_tokens: float) -> int:
        """Of a text within a prompt: what is added to each prompt counts once, at its beginning."""
        return max(0, round(num_tokens / self.tokens_per_word))


class PromptTexts:
    """Makes the same texts of the same seed. A text costs a slice, however long it is."""

    def __init__(self, seed: int, calibration: Calibration) -> None:
        rng = random.Random(f"{seed}/words")
        words = rng.choices(WORDS, k=_NUM_CORPUS_WORDS)
        self._corpus = " ".join([*words, *words])
        self._starts = [0]
        for word in words * 2:
            self._starts.append(self._starts[-1] + len(word) + 1)
        self._seed = seed
        self.calibration = calibration

    def text(self, session: Session, index: int) -> str:
        """What a turn adds: its prefixes, and then words that no other turn begins with."""
        turn = session.turns[index]
        left = turn.num_prompt_tokens - (self.calibration.extra_tokens if index == 0 else 0)
        pieces = []
        for prefix_id, num_tokens in turn.prefix:
            taken = min(num_tokens, left)
            pieces.append(self.words(f"prefix {prefix_id}", self.calibration.num_words(taken)))
            left -= taken
        num_own = self.calibration.num_words(max(0.0, left))
        if num_own or not any(pieces):
            pieces.append(self._own(session.number, index, max(1, num_own)))
        return " ".join(piece for piece in pieces if piece)

    def words(self, name: str, num_words: int) -> str:
        """The same `num_words` words for the same name."""
        rng = random.Random(f"{self._seed}/{name}")
        left, pieces = num_words, []
        while left > 0:
            begin = rng.randrange(_NUM_CORPUS_WORDS)
            taken = min(left, _NUM_CORPUS_WORDS)
            pieces.append(self._corpus[self._starts[begin] : self._starts[begin + taken] - 1])
            left -= taken
        return " ".join(pieces)

    def _own(self, number: int, index: int, num_words: int) -> str:
        """Begins with the session's number, written in words as digits, so that no cache knows it."""
        digits: list[str] = []
        rest = number * 64 + index
        while rest or not digits:
            rest, digit = divmod(rest, len(WORDS))
            digits.append(WORDS[digit])
        head = digits[:num_words]
        tail = self.words(f"turn {number}/{index}", num_words - len(head))
        return " ".join([*head, *([tail] if tail else [])])
