"""Draft length of one request: it follows the acceptance rate, and is shorter the more sequences decode.

A state machine without clock or randomness.
"""

from collections import deque
from typing import Final

from holdfast.worker.scheduler.sequence import Sequence
from holdfast.worker.step_plan import Drafting

_START: Final = 0.5  # acceptance rate assumed at first
_WEIGHT: Final = 0.3
"""Weight of the newest verification in the moving average."""
_FULL_LENGTH: Final = 3
"""Drafts from which a verification has it; one of fewer drafts says less."""

_PROBE_TOKENS: Final = 2
_FIRST_SLEEP: Final = 16  # steps of the sequence
_LONGEST_SLEEP: Final = 256
"""Longest pause in steps of the sequence."""

_BY_BATCH_SIZE: Final = ((2, 64), (4, 4), (8, 2), (16, 1))
"""Pairs of decoding sequences (at most) and most drafts for each. With more drafts they would cost other requests more
time than they save."""


def longest_for(num_decoding: int) -> int:
    """Most draft tokens worth verifying for each of this number of sequences that decode in one step."""
    return next((length for size, length in _BY_BATCH_SIZE if num_decoding <= size), 0)


class DraftLength:
    """Draft length of one sequence. While hardly any draft is accepted it drafts nothing, and probes with a short draft
    now and then, more and more rarely as long as that fails.
    """

    __slots__ = ("_acceptance", "_least_acceptance", "_num_steps_asleep", "_sleep")

    def __init__(self, least_acceptance: float = 0.15) -> None:
        """Below this acceptance rate drafting costs more than it saves. Less than 0.5."""
        self._least_acceptance = least_acceptance
        self._acceptance = _START
        self._sleep = _FIRST_SLEEP
        self._num_steps_asleep = 0

    def next(self, longest: int) -> int:
        """Tokens to guess in this step, at most `longest`. Called once for every step that decodes."""
        if self._acceptance >= self._least_acceptance:
            return min(longest, max(1, round(longest * self._acceptance * 1.25)))
        self._num_steps_asleep += 1
        return min(longest, _PROBE_TOKENS) if self._num_steps_asleep > self._sleep else 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Notes the number of verified drafts, at least one, and of accepted ones."""
        was_probe = self._acceptance < self._least_acceptance
        weight = _WEIGHT * min(1.0, num_drafts / _FULL_LENGTH)
        self._acceptance += weight * (num_accepted / num_drafts - self._acceptance)
        self._num_steps_asleep = 0
        if self._acceptance >= self._least_acceptance:
            self._sleep = _FIRST_SLEEP
        elif was_probe:
            self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)


class DraftModelProgress:
    """Tokens of each sequence that the draft model has read, and that still count."""

    def __init__(self, *, rereads: bool = False) -> None:
        """`rereads`: it reads accepted drafts again, with the model's hidden states of them (`next_token.py`); then the
        two last tokens are recomputed in each step, since otherwise the next step lacks their states.
        """
        self.rereads = rereads
        self._num_read: dict[int, int] = {}  # by sequence id

    def drafting(self, sequence: Sequence, end: int, num_drafts: int, max_num_tokens: int) -> Drafting | None:
        """Read on to position `end`, then guess `num_drafts` tokens; None where there is nothing to read.

        Reads at most `max_num_tokens`; a sequence that has more to catch up with gets its guesses in a later step.
        """
        start = self.settle(sequence)
        end = min(end, sequence.num_computed_tokens + 1) if self.rereads else end
        token_ids = tuple(sequence.token_ids[start : min(end, start + max_num_tokens)])
        if not token_ids:
            return None
        if start + len(token_ids) < end:
            num_drafts = 0
        # The last draft is guessed and not read.
        num_own = 0 if self.rereads else max(0, num_drafts - 1)
        self._num_read[sequence.sequence_id] = start + len(token_ids) + num_own
        return Drafting(first_position=start, token_ids=token_ids, num_drafts=num_drafts)

    def settle(self, sequence: Sequence) -> int:
        """Tokens that it has read. Rejected drafts do not count, nor tokens lost to a preemption; a cached prefix
        counts as read.
        """
        num_computed = sequence.num_computed_tokens
        num_read = min(self._num_read.get(sequence.sequence_id, num_computed), num_computed)
        self._num_read[sequence.sequence_id] = num_read
        return num_read

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._num_read.pop(sequence.sequence_id, None)


class NgramProposer:
    """Looks for the last `ngram_max` tokens of a sequence, else for fewer, down to `ngram_min`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._lengths = tuple(range(ngram_max, ngram_min - 1, -1))
        self._tables: dict[int, _NgramTable] = {}  # by sequence id

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Guesses at most `num_tokens` next tokens; none if the last tokens are new."""
        table = self._tables.get(sequence.sequence_id)
        if table is None:
            table = self._tables[sequence.sequence_id] = _NgramTable(self._lengths)
        token_ids = sequence.token_ids
        table.read(token_ids)
        place = table.find_end_of(token_ids)
        return () if place is None else continuation(token_ids, place, num_tokens)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._tables.pop(sequence.sequence_id, None)


class _NgramTable:
    """Positions in one sequence where each n-gram was last followed by a token."""

    __slots__ = ("_lengths", "_num_read", "_places")

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths
        self._num_read = 0
        self._places: dict[tuple[int, ...], int] = {}

    def read(self, token_ids: list[int]) -> None:
        """Takes in the tokens that are new since the last time. A sequence only ever grows."""
        for place in range(self._num_read, len(token_ids)):
            for length in self._lengths:
                if length <= place:
                    self._places[tuple(token_ids[place - length : place])] = place
        self._num_read = len(token_ids)

    def find_end_of(self, token_ids: list[int]) -> int | None:
        """The place after the last earlier occurrence of the longest n-gram that `token_ids` end in."""
        for length in self._lengths:
            place = self._places.get(tuple(token_ids[-length:]))
            if place is not None:
                return place
        return None


def continuation(token_ids: list[int], place: int, num_tokens: int) -> tuple[int, ...]:
    """The `num_tokens` tokens from `place` on, as if they were to follow; beyond the end they repeat themselves."""
    drafts = token_ids[place : place + num_tokens]
    period = len(drafts)
    return tuple(drafts[i % period] for i in range(num_tokens))


_CONTEXT_LENGTHS: Final = (12, 6, 3, 2)
"""Longest first."""

_MIN_PROBABILITY: Final = 0.2
"""A draft goes on while its tokens so far, all together, are at least so likely by their counts."""


class SuffixProposer:
    """Counts the tokens that follow each n-gram. Outputs are remembered until there are more than `max_corpus_tokens`
    of them.

    Requests with different cache salts do not learn from each other, so they cannot time each other either.
    """

    def __init__(self, max_corpus_tokens: int) -> None:
        self._max_corpus_tokens = max_corpus_tokens
        self._own: dict[int, ContinuationCounts] = {}  # of the sequences that are alive, by id
        self._corpora: dict[str, ContinuationCounts] = {}  # by cache salt
        self._outputs: deque[tuple[str, list[int]]] = deque()  # texts of the corpora, oldest first
        self._num_corpus_tokens = 0

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Guesses at what follows, at most `num_tokens`; none if the last tokens are new."""
        own = self._own.setdefault(sequence.sequence_id, ContinuationCounts())
        own.read(sequence.token_ids)
        corpus = self._corpora.get(sequence.request.cache_salt)
        sources: tuple[ContinuationCounts, ...] = (own,) if corpus is None else (own, corpus)
        tail = sequence.token_ids[-_CONTEXT_LENGTHS[0] :]
        num_before = len(tail)
        probability = 1.0
        while len(tail) < num_before + num_tokens:
            token_id, share = _likeliest(sources, tail)
            probability *= share
            if probability < _MIN_PROBABILITY:
                break
            tail.append(token_id)
        return tuple(tail[num_before:])

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Its output joins the corpus, also if it was cut off: a stop string does that too.

        The prompt's last tokens come along, so that an output is known by how it begins.
        """
        self._own.pop(sequence.sequence_id, None)
        start = max(0, sequence.num_prompt_tokens - _CONTEXT_LENGTHS[0])
        output = sequence.token_ids[start:][-self._max_corpus_tokens :]
        if not sequence.num_output_tokens or not self._max_corpus_tokens:
            return
        salt = sequence.request.cache_salt
        self._corpora.setdefault(salt, ContinuationCounts()).add(output)
        self._outputs.append((salt, output))
        self._num_corpus_tokens += len(output)
        while self._num_corpus_tokens > self._max_corpus_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt, output = self._outputs.popleft()
        self._num_corpus_tokens -= len(output)
        self._corpora[salt].remove(output)
        if not self._corpora[salt]:
            del self._corpora[salt]


class ContinuationCounts:
    """Counts of the tokens that followed each context of the fixed lengths. False when there are none."""

    __slots__ = ("_counts", "_num_read")

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._num_read = 0

    def __len__(self) -> int:
        return len(self._counts)

    def read(self, token_ids: list[int]) -> None:
        """Counts the tokens of one growing text that are new since the last time."""
        self._count(token_ids, self._num_read, 1)
        self._num_read = len(token_ids)

    def add(self, token_ids: list[int]) -> None:
        """Counts a separate text."""
        self._count(token_ids, 0, 1)

    def remove(self, token_ids: list[int]) -> None:
        """Takes back an `add`."""
        self._count(token_ids, 0, -1)

    def after(self, context: tuple[int, ...]) -> dict[int, int] | None:
        """Counts of the tokens that followed."""
        return self._counts.get(context)

    def _count(self, token_ids: list[int], start: int, change: int) -> None:
        for place in range(start, len(token_ids)):
            for length in _CONTEXT_LENGTHS:
                if length <= place:
                    self._change(tuple(token_ids[place - length : place]), token_ids[place], change)

    def _change(self, context: tuple[int, ...], token_id: int, change: int) -> None:
        followers = self._counts.setdefault(context, {})
        followers[token_id] = followers.get(token_id, 0) + change
        if not followers[token_id]:
            del followers[token_id]
            if not followers:
                del self._counts[context]


def _likeliest(sources: tuple[ContinuationCounts, ...], tail: list[int]) -> tuple[int, float]:
    """The token that most often followed the longest known end of `tail`, and its share; a share of 0 if no end is
    known.

    For the same length the first source that knows it decides. Equal counts: the lowest token id.
    """
    for length in _CONTEXT_LENGTHS:
        context = tuple(tail[-length:])
        for source in sources if len(context) == length else ():
            if followers := source.after(context):
                count, negative_id = max((count, -token_id) for token_id, count in followers.items())
                return -negative_id, count / sum(followers.values())
    return 0, 0.0
