"""Workload: sessions of one or several turns, with their lengths and shared prefixes, generated from a seed or a trace.

The same seed gives the same sessions, however they are then sent.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from holdfast.cluster.load_trace import Arrival
from holdfast.worker.errors import ConfigurationError

PROCESSES: Final = ("poisson", "gamma", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A renewal process of `rate` arrivals a second."""

    rate: float
    process: str = "poisson"
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps, as in vLLM's load tool: 1 is Poisson, below 1 comes in bursts, above 1
    is more even. The gaps' coefficient of variation is 1 / sqrt(burstiness)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigurationError(f"--rate {self.rate:g}: must be above 0 requests a second")
        if self.process not in PROCESSES:
            raise ConfigurationError(f"--arrivals {self.process}: must be among {', '.join(PROCESSES)}")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ConfigurationError(f"--burstiness {self.burstiness:g}: must be above 0")

    def times(self, seed: int) -> Iterator[float]:
        """Seconds from the beginning of the load, without end.

        The gaps of one seed are the same at every rate, to scale, so loads of two rates differ only in their rate.
        """
        rng = random.Random(f"{seed}/arrivals")
        now = 0.0
        while True:
            now += self._unit_gap(rng) / self.rate
            yield now

    def _unit_gap(self, rng: random.Random) -> float:
        """A gap of mean 1."""
        match self.process:
            case "poisson":
                return rng.expovariate(1.0)
            case "gamma":
                return rng.gammavariate(self.burstiness, 1 / self.burstiness)
            case _:
                return 1.0


FORMS: Final = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN"

_KINDS: Final = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
"""Kinds by name, with the number of parameters of each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. No length is below 1."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parsed(cls, flag: str, text: str) -> "Lengths":
        """Parses `128`, `uniform:64:256` and so on. Raises `ConfigurationError`, naming the flag."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if len(values) != _KINDS.get(kind, 0) or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigurationError(f"--{flag} {text}: must be {FORMS}, of numbers of tokens")
        lengths = cls(kind, *values)
        if values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
            raise ConfigurationError(
                f"--{flag} {text}: must be at least 1 token, and no range may end before it begins"
            )
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        match self.kind:
            case "uniform":
                return rng.randint(int(self.first), int(self.second))
            case "normal":
                drawn = rng.gauss(self.first, self.second)
            case "lognormal":
                drawn = self.first * math.exp(rng.gauss(0.0, self.second))
            case "exponential":
                drawn = rng.expovariate(1 / self.first)
            case _:
                drawn = self.first
        return max(1, round(drawn))

    def __str__(self) -> str:
        numbers = [f"{value:g}" for value in (self.first, self.second)[: _KINDS[self.kind]]]
        return numbers[0] if self.kind == "fixed" else ":".join((self.kind, *numbers))


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, and its addition to the conversation."""

    num_prompt_tokens: int
    """Tokens of the new text alone, prefixes included; earlier turns come on top."""
    num_output_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Pieces that the text begins with, as (id, number of tokens): texts with equal pieces at the front share them."""
    pause_s: float = 0.0
    """Between the answer before and this turn, as a tool of an agent runs."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. Its turns are sent one after the other, each with all earlier questions and answers."""

    number: int
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """When its first turn is due, in an open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sessions of a run: lengths, prefixes and texts."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    num_prefixes: int = 0
    prefix_tokens: int = 0
    num_turns: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigurationError(f"--turns {self.num_turns}: must be at least 1")
        if self.num_prefixes < 0:
            raise ConfigurationError(f"--prefixes {self.num_prefixes}: must not be below 0")
        if (self.num_prefixes > 0) != (self.prefix_tokens > 0):
            given = f"--prefixes {self.num_prefixes} --prefix-tokens {self.prefix_tokens}"
            raise ConfigurationError(f"{given}: must be above 0 both, or neither")

    def sessions(self, first_number: int = 0) -> Iterator[Session]:
        """Yields sessions without end. Lengths do not depend on `first_number`; texts do."""
        rng = random.Random(f"{self.seed}/lengths")
        for number in count(first_number):
            yield Session(number, tuple(self._turn(rng, is_first=not index) for index in range(self.num_turns)))

    def num_requests(self, num_sessions: int) -> int:
        """Turns of the first sessions."""
        return sum(len(session.turns) for session in islice(self.sessions(), num_sessions))

    def _turn(self, rng: random.Random, *, is_first: bool) -> Turn:
        own = self.prompt_tokens.draw(rng)
        num_output_tokens = self.output_tokens.draw(rng)
        if not (self.num_prefixes and is_first):
            return Turn(own, num_output_tokens)
        prefix = ((rng.randrange(self.num_prefixes), self.prefix_tokens),)
        return Turn(self.prefix_tokens + own, num_output_tokens, prefix)


def traced(arrivals: Sequence[Arrival], speed: float = 1.0, first_number: int = 0) -> list[Session]:
    """The sessions of a trace: one turn each, the first due at once, `speed` times as fast as it was recorded."""
    if not speed > 0:
        raise ConfigurationError(f"--trace-speed {speed:g}: must be above 0")
    first_s = arrivals[0].arrival_s
    return [
        Session(
            number,
            (Turn(one.num_prompt_tokens, one.num_output_tokens, one.prefix),),
            (one.arrival_s - first_s) / speed,
        )
        for number, one in enumerate(arrivals, start=first_number)
    ]


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
    """The server's token count of a text: tokens per word, and tokens added to each prompt."""

    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0
    is_measured: bool = False

    @classmethod
    def of(cls, probes: Sequence[tuple[int, int]]) -> "Calibration":
        """Calibrates from two probes, each (words, tokens)."""
        (few_words, few_tokens), (many_words, many_tokens) = probes
        per_word = (many_tokens - few_tokens) / (many_words - few_words)
        if not per_word > 0:
            return cls()
        return cls(per_word, few_tokens - few_words * per_word, is_measured=True)

    def num_words(self, num_tokens: float) -> int:
        """Words for a number of tokens of text inside a prompt: tokens that the tokenizer adds to each prompt count
        once, at its beginning.
        """
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
        """The text that a turn adds: its prefixes, then words that no other turn begins with."""
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
