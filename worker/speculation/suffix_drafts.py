"""Suffix drafts: the tokens that most often followed a sequence's last tokens, in its own text and in earlier outputs.

After SuffixDecoding (Oliaro et al. 2024). Continuations are counted, the longest known context decides, and a draft
ends where it becomes unlikely. Contexts of a few fixed lengths stand in for a suffix tree, which bounds the memory. Two
replicas have seen different outputs and draft differently; tokens do not depend on drafts.
"""

from collections import deque
from typing import Final

from holdfast.worker.scheduling.sequence import Sequence

_CONTEXT_LENGTHS: Final = (12, 6, 3, 2)
"""Longest first."""

_LEAST_PROBABILITY: Final = 0.2
"""A draft goes on while its tokens so far, all together, are at least so likely by their counts."""


class SuffixProposer:
    """Counts what follows what. Outputs are remembered until there are more than `max_corpus_tokens` of them.

    Requests with different cache salts do not learn from each other, so they cannot time each other either.
    """

    def __init__(self, max_corpus_tokens: int) -> None:
        self._max_corpus_tokens = max_corpus_tokens
        self._own: dict[int, ContinuationCounts] = {}  # of the sequences that are alive, by id
        self._corpora: dict[str, ContinuationCounts] = {}  # by cache salt
        self._outputs: deque[tuple[str, list[int]]] = deque()  # what is in the corpora, oldest first
        self._num_corpus_tokens = 0

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """At most `num_tokens` guesses at what follows; none if the last tokens are new."""
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
            if probability < _LEAST_PROBABILITY:
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
    """How often each token followed each context of the fixed lengths. False when it knows none."""

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
        """Counts a text of its own."""
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
    """The token that most often followed the longest known end of `tail`, and its share; a share of 0 if none is.

    For the same length the first source that knows it decides. Equal counts: the lowest token id.
    """
    for length in _CONTEXT_LENGTHS:
        context = tuple(tail[-length:])
        for source in sources if len(context) == length else ():
            if followers := source.after(context):
                count, negative_id = max((count, -token_id) for token_id, count in followers.items())
                return -negative_id, count / sum(followers.values())
    return 0, 0.0
