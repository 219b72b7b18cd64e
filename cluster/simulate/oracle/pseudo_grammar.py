"""Grammars of the simulator's pseudo-model: nested objects, and the matcher that knows where in them an output is.

`"ab:cde:2"` is one or two objects; an object is `a`, then one or two entries, then `b`; an entry is `c`, `d`, `e` or an
object. What may come next depends on the whole output, as with JSON, and not only on its last token. What may not live
here: which sequence has which matcher (`worker/plan/grammar_matchers.py`).
"""

from collections.abc import Iterable, Sequence

from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID, VOCAB_SIZE, PseudoCodec


class PseudoMatcher:
    """The `Matcher` of such a grammar: it goes from token to token, with a count of entries for each open object."""

    def __init__(self, grammar: str) -> None:
        ends, items, most = grammar.split(":")
        self._opener, self._closer = PseudoCodec().encode(ends, False)
        self._items = PseudoCodec().encode(items, False)
        self._most = int(most)
        self._states: list[tuple[int, ...]] = [(0,)]
        """After each token. The counts of entries, outermost first, begin with that of whole objects."""
        self._error = ""

    def compute_bitmask(self) -> bytes:
        return _bitmask(self._allowed())

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        num_before = len(self._states)
        num_read = next((i for i, token in enumerate(tokens) if not self.consume_token(token)), len(tokens))
        self._error = ""
        del self._states[num_before:]
        return num_read

    def consume_token(self, token: int) -> bool:
        if self._error or token not in self._allowed():
            self._error = self._error or f"token {token} after {len(self._states) - 1} others"
            return False
        counts = self._states[-1]
        if token == self._opener:
            counts = (*counts, 0)
        elif token == self._closer:
            counts = (*counts[:-2], counts[-2] + 1)
        else:
            counts = (*counts[:-1], counts[-1] + 1)
        self._states.append(counts)
        return True

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def rollback(self, num_tokens: int) -> bool:
        del self._states[len(self._states) - num_tokens :]
        return True

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def _allowed(self) -> list[int]:
        """What may come next; after an error only the end, as with the real matcher."""
        counts = self._states[-1]
        if self._error:
            return [EOS_TOKEN_ID]
        more = [self._opener] if counts[-1] < self._most else []
        if len(counts) == 1:
            return more + ([EOS_TOKEN_ID] if counts[0] else [])
        return more + (self._items if more else []) + ([self._closer] if counts[-1] else [])


def allows(mask: bytes, token_id: int) -> bool:
    """Whether a mask has the bit of a token set."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def _bitmask(token_ids: Iterable[int]) -> bytes:
    """A bit for each token id, the lowest first."""
    return sum(1 << token_id for token_id in token_ids).to_bytes(-(-VOCAB_SIZE // 8), "little")
