"""Pseudo-model of the simulator: the score of each token is a hash of the tokens before it, the seed and the position.

It is for checking whole requests against the oracle, with text, grammars, penalties and log-probabilities; unit tests
of schedulers use the plainer `tests/pseudo_model.py`. A wrong prefix, seed or position changes the output. The
tokenizer has tokens that are parts of characters, and letters that make stop strings likely. What may not live here:
running plans (`pseudo_runner.py`), and what a request does to the scores (`pseudo_draws.py`, `oracle_draws.py`).
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from holdfast.router.text.tokenizer import Tokenizer

EOS_TOKEN_ID: Final = 0
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
    """How each token does in the draw of output number `output_index`, after `prefix`, one byte a token: the highest
    score wins, of equal ones the lowest token id."""
    return blake2b(prefix, digest_size=VOCAB_SIZE, key=struct.pack("<qi", seed, output_index)).digest()


def likelihoods(prefix: bytes) -> bytes:
    """How likely each token is after `prefix`, whatever the request: larger is likelier, see `logprob`. The scores of
    draws without noise."""
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

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [_PIECES.index(character.encode()) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        pieces = [_PIECES[token_id] for token_id in token_ids if token_id not in skipped]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        return _PIECES.index(token.encode()) if token.encode() in _PIECES else None

    def token(self, token_id: int) -> str:
        return _PIECES[token_id].decode("utf-8", "replace")


def pseudo_tokenizer() -> Tokenizer:
    return Tokenizer(PseudoCodec(), special_tokens={"eos_token": "</s>"}, eos_token_id=EOS_TOKEN_ID)
