"""A model without arithmetic: the next token is a hash of the tokens before it, the seed and the output position.

The keys and values of `PseudoRunner` are the tokens themselves, in real blocks, and it reads the whole prefix back from
them before it draws. So a block that is used twice, freed too early or listed in the wrong order changes the output, as
in a real model, and so does a seed or a position that is not what it was. The tokenizer is as small, with tokens that
are parts of characters and letters that make stop strings likely.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from router.tokenizer import Tokenizer
from worker.plan import BlockCopy, ScheduledSequence, StepPlan, StepResult

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
_EMPTY: Final = b"\xff"
"""What slots hold that nobody has written: no token."""


def next_token(prefix: bytes, seed: int, output_index: int, banned: Sequence[int] = ()) -> int:
    """Output number `output_index`, after `prefix`, one byte a token; never one of `banned`."""
    key = struct.pack("<qi", seed, output_index)
    drawn = int.from_bytes(blake2b(prefix, digest_size=8, key=key).digest())
    for token_id in banned[:VOCAB_SIZE]:
        if drawn % VOCAB_SIZE == token_id:
            return next_token(prefix, seed + 1, output_index, banned)
    return drawn % VOCAB_SIZE


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


def pseudo_tokenizer() -> Tokenizer:
    return Tokenizer(PseudoCodec(), special_tokens={"eos_token": "</s>"}, eos_token_id=EOS_TOKEN_ID)


class PseudoRunner:
    """Runs plans on the pseudo-model, with a cache of its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = bytearray(_EMPTY * (num_blocks * block_size))

    def run(self, plan: StepPlan) -> StepResult:
        self._copy(plan.block_copies)
        for sequence in plan.sequences:
            self._write(sequence)
        drawn = tuple(self._draw(sequence) for sequence in plan.sequences)
        return StepResult(step_id=plan.step_id, token_ids=drawn)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """All sources are read before any destination is written."""
        size = self._block_size
        sources = [self._slots[copy.source * size :][: copy.num_tokens] for copy in copies]
        for copy, tokens in zip(copies, sources, strict=True):
            start = copy.destination * size
            self._slots[start : start + size] = tokens.ljust(size, _EMPTY)

    def _write(self, sequence: ScheduledSequence) -> None:
        size, block_ids = self._block_size, sequence.block_ids
        for position, token_id in enumerate(sequence.token_ids, sequence.first_position):
            self._slots[block_ids[position // size] * size + position % size] = token_id

    def _draw(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        draw = sequence.draw
        if draw is None:
            return ()
        size, end = self._block_size, sequence.first_position + len(sequence.token_ids)
        blocks = [self._slots[block_id * size : (block_id + 1) * size] for block_id in sequence.block_ids]
        prefix = bytes(b"".join(blocks)[:end])
        if prefix[0] == POISON_TOKEN_ID and draw.first_output_index >= draw.seed % NUM_POISON_STEPS:
            raise PoisonedError
        tokens: list[int] = []
        for output_index in range(sequence.num_draws):
            num_read = end - sequence.num_draws + 1 + output_index
            position = draw.first_output_index + output_index
            controls = draw.controls
            is_early = controls is not None and position < controls.min_tokens
            banned = controls.end_token_ids if controls is not None and is_early else ()
            tokens.append(next_token(prefix[:num_read], draw.seed, position, banned))
        return tuple(tokens)
