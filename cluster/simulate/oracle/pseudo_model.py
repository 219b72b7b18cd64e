"""Pseudo-model of the simulator: the score of each token is a hash of the tokens before it, the seed and the position.

It is for checking whole requests against the oracle, with text, grammars, penalties and log-probabilities; unit tests
of schedulers use the plainer `tests/pseudo_model.py`. A wrong prefix, seed or position changes the output. The
tokenizer has tokens that are parts of characters, and letters that make stop strings likely.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from holdfast.router.text.tokenizer import EncodedPair, Tokenizer
from holdfast.worker.draws import DrawParams, LogitsSettings, banned_token_ids
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import TokenLogprob

EOS_TOKEN_ID: Final = 0  # end of sequence
_LETTERS: Final = "abcdefgh"
_PIECES: Final = (
    b"</s>",
    *(letter.encode() for letter in _LETTERS),
    *((one + other).encode() for one in _LETTERS[:4] for other in _LETTERS[:4]),
    *(b" ", b".", "é".encode(), "京".encode()),
    *(b"\xc3", b"\xa9", b"\xe4\xba", b"\xac"),
)
POISON_TOKEN_ID: Final = len(_PIECES) - 5
"""A prompt that begins with it kills its replica, `seed % NUM_POISON_STEPS` output tokens later."""
NUM_POISON_STEPS: Final = 4
WHOLE_TOKEN_IDS: Final = tuple(range(1, POISON_TOKEN_ID))
"""Tokens that are whole characters, and no end of sequence: prompts are made of them."""
VOCAB_SIZE: Final = len(_PIECES)


def scores(prefix: bytes, seed: int, output_index: int) -> bytes:
    """Score of each token in the draw of output number `output_index` after `prefix`, one byte a token: the highest
    score wins, and the lowest token id among equals.
    """
    return blake2b(prefix, digest_size=VOCAB_SIZE, key=struct.pack("<qi", seed, output_index)).digest()


def likelihoods(prefix: bytes) -> bytes:
    """Likelihood of each token after `prefix`, for every request: larger is likelier, see `logprob`. These are the
    scores of draws without noise.
    """
    return blake2b(prefix, digest_size=VOCAB_SIZE).digest()


def logprob(likelihood: int) -> float:
    """A likelihood as a number below 0, in steps that every float carries unchanged."""
    return (likelihood - 256) / 32


class PoisonedError(Exception):
    """A request has brought the runner down."""


class PseudoCodec:
    """The `Codec` of the pseudo-model's tokens."""

    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset({EOS_TOKEN_ID})

    def encode(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        return [_PIECES.index(character.encode()) for character in text]

    def encode_pair(self, first: str, second: str, most: int | None = None) -> EncodedPair:
        raise InvalidRequestError("second_text", second, "is for models that score pairs of texts")

    def beginning(self, text: str, num_tokens: int) -> str:
        return text[:num_tokens]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids; invalid UTF-8 is replaced."""
        skipped = self.special_token_ids if skip_special_tokens else ()
        pieces = [_PIECES[token_id] for token_id in token_ids if token_id not in skipped]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        return _PIECES.index(token.encode()) if token.encode() in _PIECES else None

    def token(self, token_id: int) -> str:
        return _PIECES[token_id].decode("utf-8", "replace")


def pseudo_tokenizer() -> Tokenizer:
    return Tokenizer(PseudoCodec(), special_tokens={"eos_token": "</s>"}, eos_token_id=EOS_TOKEN_ID)


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
        """Allowed next tokens; after an error only the end, as with the real matcher."""
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


_OUT = float("-inf")


def drawn_token(prefix: bytes, params: DrawParams, mask: bytes | None) -> int:
    """Token drawn after `prefix`; `mask` is that of a grammar."""
    is_greedy = params.sampling.temperature == 0
    raw = likelihoods(prefix) if is_greedy else scores(prefix, params.seed, params.first_output_index)
    if params.logits_settings is None:
        return raw.index(max(raw))
    row = [score / 16 - 8 for score in raw]
    if mask is not None:
        row = [value if allows(mask, token_id) else _OUT for token_id, value in enumerate(row)]
    row = _ban(_keep_allowed(row, params.logits_settings), banned_token_ids(params))
    for token_id, bias in params.logits_settings.logit_bias:
        row[token_id] += bias
    if params.logits_settings.penalize:
        _penalize(row, params.logits_settings, Counter(params.output_token_ids))
    return row.index(max(row))


def token_logprob(prefix: bytes, token_id: int, num_logprobs: int, chosen: Sequence[int] = ()) -> TokenLogprob:
    """Log-probability entry of a token after `prefix`, with this number of the most likely tokens, or with `chosen`
    ones.
    """
    values = likelihoods(prefix)
    order = sorted(range(VOCAB_SIZE), key=lambda other: (-values[other], other))
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob(values[token_id]),
        rank=order.index(token_id) + 1,
        top=tuple((other, logprob(values[other])) for other in chosen or order[:num_logprobs]),
    )


def _keep_allowed(row: list[float], logits_settings: LogitsSettings) -> list[float]:
    """The row with the allowed tokens alone, unless its grammar allows none of them."""
    if logits_settings.allowed_token_ids is None:
        return row
    kept = [value if token_id in logits_settings.allowed_token_ids else _OUT for token_id, value in enumerate(row)]
    return row if max(kept) == _OUT else kept


def _ban(row: list[float], token_ids: list[int]) -> list[float]:
    """The row without some tokens, unless no others are left."""
    kept = list(row)
    for token_id in token_ids:
        kept[token_id] = _OUT
    return row if max(kept) == _OUT else kept


def _penalize(row: list[float], logits_settings: LogitsSettings, counts: Counter[int]) -> None:
    for token_id in counts.keys() | set(logits_settings.prompt_token_ids):
        factor = logits_settings.repetition_penalty
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id, count in counts.items():
        row[token_id] -= logits_settings.frequency_penalty * count + logits_settings.presence_penalty
