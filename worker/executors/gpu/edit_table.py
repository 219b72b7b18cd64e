"""Edits of a step's rows as arrays: what bans, biases, penalties and masks say, as `kernels/edits.py` reads it."""

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from struct import Struct, pack
from struct import error as StructError
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.draws import PENALTIES, DrawParams, LogitsSettings, banned_token_ids
from holdfast.worker.executors.draw_records import NONE
from holdfast.worker.executors.gpu.draw_launches import EDIT_WORDS, mask_words

Int32Array = NDArray[np.int32]

_EDIT: Final = Struct(f"={len(PENALTIES)}f{EDIT_WORDS - len(PENALTIES)}i")
_WORD_BYTES: Final = 4
_UNKNOWN: Final = -1
"""In place of token ids that int32 does not hold: no row has them."""


class EditTable:
    """The edits of a step. Token ids that the model does not have are kept, and do nothing."""

    def __init__(self, draws: Sequence[DrawParams], masks: Mapping[int, bytes] | None, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masks: list[Int32Array] = []
        self._lists: list[bytes] = []
        self._num_tokens = 0
        self.numbers = [NONE] * len(draws)
        """Of each row."""
        packed: list[bytes] = []
        for row, params in enumerate(draws):
            if params.logits_settings is not None:
                self.numbers[row] = len(packed)
                packed.append(self._edit(params, params.logits_settings, masks.get(row) if masks else None))
        self.count = len(packed)
        self._packed = b"".join(packed)

    @property
    def table(self) -> Int32Array:
        """Flat."""
        return np.frombuffer(self._packed, np.int32)

    @property
    def tokens(self) -> Int32Array:
        """The lists of all edits, one after the other, and one number more: never empty."""
        return np.frombuffer(b"".join((*self._lists, b"\0" * _WORD_BYTES)), np.int32)

    @cached_property
    def masks(self) -> Int32Array:
        """[masks, words]"""
        return np.array(self._masks, np.int32).reshape(-1, mask_words(self._vocab_size))

    def _edit(self, params: DrawParams, settings: LogitsSettings, grammar: bytes | None) -> bytes:
        penalizes = settings.penalize
        ids = (
            params.output_token_ids if penalizes else (),
            settings.prompt_token_ids if penalizes else (),
            settings.biased_token_ids,
            banned_token_ids(params),
        )
        first, lists = self._num_tokens, (*map(_packed, ids), settings.biases.tobytes())
        self._lists += lists
        self._num_tokens += sum(map(len, lists)) // _WORD_BYTES
        places = (first, *map(len, ids), *self._place_masks(settings, grammar))
        return _EDIT.pack(*settings.penalties, penalizes, *places)

    def _place_masks(self, settings: LogitsSettings, grammar: bytes | None) -> tuple[int, int]:
        """The numbers of the grammar's mask and of the allowed tokens', of those that the grammar allows."""
        bits, number = None, NONE
        if grammar is not None:
            bits = self._words(np.frombuffer(grammar, np.uint8))
            number = self._placed(bits)
        if settings.allowed_token_ids is None:
            return number, NONE
        is_allowed = np.zeros(self._vocab_size, bool)
        allowed = np.frombuffer(settings.allowed_token_ids, np.int64)
        is_allowed[allowed[(allowed >= 0) & (allowed < self._vocab_size)]] = True
        if not is_allowed.any():
            return number, NONE
        words = self._words(np.packbits(is_allowed, bitorder="little"))
        return number, self._placed(words if bits is None else words & bits)

    def _placed(self, words: Int32Array) -> int:
        self._masks.append(words)
        return len(self._masks) - 1

    def _words(self, packed: NDArray[np.uint8]) -> Int32Array:
        """A mask's bits as words, zeros behind them."""
        bits = np.zeros(4 * mask_words(self._vocab_size), np.uint8)
        count = min(len(bits), len(packed))
        bits[:count] = packed[:count]
        return bits.view(np.int32)


def _packed(token_ids: "Sequence[int] | array[int]") -> bytes:
    """Token ids as int32."""
    if not isinstance(token_ids, array):
        try:
            return pack(f"={len(token_ids)}i", *token_ids)  # three times as fast as an array, and outputs are long
        except StructError:
            token_ids = array("q", token_ids)
    ids = np.array(token_ids, np.int64)
    return np.where((ids >= 0) & (ids < 2**31), ids, _UNKNOWN).astype(np.int32).tobytes()
