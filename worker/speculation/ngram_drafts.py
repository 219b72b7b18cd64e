"""N-gram drafts: the tokens that followed the last occurrence of a sequence's last few tokens.

Prompt lookup (Saxena 2023), as vLLM's `ngram`. The longest match counts, and of several the most recent one. A table
from n-grams to their last place grows with the sequence, so a step's cost is proportional to its new tokens.
"""

from holdfast.worker.scheduling.sequence import Sequence


class NgramProposer:
    """Looks for the last `ngram_max` tokens of a sequence, else for fewer, down to `ngram_min`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._lengths = tuple(range(ngram_max, ngram_min - 1, -1))
        self._tables: dict[int, _NgramTable] = {}  # by sequence id

    def propose(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """At most `num_tokens` guesses at what follows; none if the last tokens are new."""
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
    """Where in one sequence each n-gram was last followed by a token."""

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
