"""Launches of the kernels that draw tokens: torch tensors in, the grid for a number of rows, room that stays; and what
bans, biases, penalties and masks say of a step's rows, as the arrays that `kernels/edits.py` reads.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct, pack
from struct import error as StructError
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.draws import PENALTIES, DrawParams, LogitsSettings, banned_token_ids
from holdfast.worker.executors.gpu.graphs import Buffers
from holdfast.worker.executors.gpu.kernels import draws, edits, reports
from holdfast.worker.executors.gpu.kernels import reports as rows
from holdfast.worker.executors.gpu.kernels.edits import put_in
from holdfast.worker.executors.gpu.launches import Launch, triton_launch
from holdfast.worker.executors.layout_arithmetic import next_power
from holdfast.worker.executors.step_sampler import NONE

RECORD_WORDS: Final[int] = rows.RECORD.value
ABSENT: Final[int] = rows.ABSENT.value
GIVEN: Final[int] = rows.GIVEN.value
EDITS: Final[int] = rows.EDITS.value
"""The places of the given token and of the edits' number in a record."""
EDIT_WORDS: Final[int] = edits.EDIT.value

REPORT_WORDS: Final[int] = reports.HEAD.value
"""Words of a row's report before its best tokens."""

_CHUNK: Final[int] = rows.CHUNK.value
_CHUNK_BLOCKS: Final[int] = rows.CHUNK_BLOCKS.value
_SPACE: Final[int] = draws.SPACE_BLOCKS.value * draws.LANES.value
_CHUNK_WARPS: Final = 4  # warps of a program for a part of a row
_ROW_WARPS: Final = 8  # warps of a program for a whole row


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of logits, and the arguments of each."""

    logits: Tensor
    """[rows, stride], float32"""
    vocab_size: int
    records: Tensor
    """[rows, RECORD_WORDS], int32"""

    masks: Tensor | None = None
    """[masks, `mask_words`], int32: a bit for each token that may be drawn; None where no row has one."""
    kept: Tensor | None = None
    """[rows], int32: which mask is a row's, -1 for none. `edit` fills it."""

    @property
    def num_chunks(self) -> int:
        return -(-self.vocab_size // _CHUNK)


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of some rows, as `kernels/edits.py` reads them."""

    table: Tensor
    """[edits, EDIT_WORDS], int32"""
    tokens: Tensor
    """Lists of tokens, int32."""
    saved: Tensor
    """Scratch space of the same length, float32."""
    counts: Tensor
    """[rows, vocab], int32: zeros."""


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class DrawLaunches:
    """The kernels of draws as functions of tensors. Their results are in permanent buffers."""

    def __init__(self, buffers: Buffers, launch: Launch = triton_launch) -> None:
        self._buffers = buffers
        self._launch = launch

    def draw(self, given: Rows) -> Tensor:
        """The token of each row [rows], int32; -1 where a row has a NaN or its best logit is infinite."""
        take, num_rows, num_chunks = self._buffers.take, len(given.records), given.num_chunks
        num_blocks = num_chunks * _CHUNK_BLOCKS
        shared = {**_shared(given), **_masks(given)}
        found = {
            "bests": take("block bests", (num_rows, num_blocks)),
            "flaws": take("flaws", (num_rows, num_chunks), torch.int32),
        }
        race = {
            "starts": take("starts", (num_rows, 4)),
            "firsts": take("firsts", (num_rows,), torch.int32),
        }
        won = {
            "scores": take("scores", (num_rows, num_chunks), torch.float64),
            "winners": take("winners", (num_rows, num_chunks), torch.int32),
        }
        listed = take("listed", (num_rows, num_blocks), torch.int32)
        space, drawn = take("space", (num_rows, _SPACE)), take("drawn", (num_rows,), torch.int32)
        sizes = {"BLOCKS": next_power(num_blocks), "CHUNKS": next_power(num_chunks)}
        by_chunk, by_row = (num_rows, num_chunks), (num_rows,)
        self._run(draws.best_of_blocks_of_64, by_chunk, {**shared, **found})
        self._run(draws.start_races, by_row, {**shared, **found, **race, "listed": listed, **sizes})
        self._run(draws.race_chunks, by_chunk, {**shared, **race, **won})
        room = {"space": space, "drawn": drawn, "CHUNKS": sizes["CHUNKS"]}
        self._run(draws.settle_races, by_row, {**shared, **race, **won, **room})
        return drawn

    def edit(self, given: Rows, changes: Edits) -> None:
        """Edits rows in place, and finds the mask of each."""
        arguments = {**_shared(given), **_of_edits(given, changes), **_masks(given), "counts": changes.counts}
        del arguments["MASKED"]
        kept = given.kept if given.kept is not None else self._buffers.take("kept", (len(given.records),), torch.int32)
        self._run(edits.edit_rows, (len(given.records),), {**arguments, "kept": kept})

    def restore(self, given: Rows, changes: Edits) -> None:
        """Undoes `edit`."""
        arguments = {**_shared(given), **_of_edits(given, changes)}
        del arguments["num_chunks"]
        self._run(edits.restore_rows, (len(given.records),), arguments)

    def tell(self, given: Rows, drawn: Tensor, most: int) -> Tensor:
        """Reports about the drawn tokens [rows, REPORT_WORDS + 2 most], int32, with at most `most` best tokens each."""
        take, num_rows, num_chunks = self._buffers.take, len(given.records), given.num_chunks
        num_blocks = num_chunks * _CHUNK_BLOCKS
        shared = _shared(given)
        found = {
            "bests": take("raw bests", (num_rows, num_blocks)),
            "masses": take("raw masses", (num_rows, num_blocks)),
        }
        report = take("report", (num_rows, REPORT_WORDS + 2 * most), torch.int32)
        listed = take("listed", (num_rows, num_blocks), torch.int32)
        out = {"drawn": drawn, "report": report, "listed": listed, "most": most, "BLOCKS": next_power(num_blocks)}
        self._run(reports.block_masses, (num_rows, num_chunks), {**shared, **found})
        self._run(reports.tell, (num_rows,), {**shared, **found, **out})
        return report

    def _run(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        warps = _CHUNK_WARPS if len(grid) > 1 else _ROW_WARPS
        self._launch(kernel, grid, arguments, num_warps=warps, num_stages=1)


def _shared(given: Rows) -> dict[str, Any]:
    return {
        "logits": given.logits,
        "records": given.records,
        "stride": given.logits.stride(0),
        "vocab": given.vocab_size,
        "num_chunks": given.num_chunks,
    }


def _masks(given: Rows) -> dict[str, Any]:
    nothing = given.records
    return {
        "masks": nothing if given.masks is None else given.masks,
        "kept": nothing if given.kept is None else given.kept,
        "mask_words": mask_words(given.vocab_size),
        "MASKED": given.masks is not None,
    }


def _of_edits(given: Rows, changes: Edits) -> dict[str, Any]:
    return {"edits": changes.table, "tokens": changes.tokens, "saved": changes.saved}


_BLOCK: Final = 256  # rows of a program


class DrawnTokens:
    """The tokens of the last step that was launched. Its executor and its sampler write them down."""

    def __init__(self, launch: Launch) -> None:
        self.last: Tensor | None = None
        """[draws], int32, -1 for a row without a token; None where nothing was drawn here. They stay in their buffer
        until the next step draws, which is after it was given them.
        """
        self._launch = launch

    def put_in(self, token_ids: Tensor) -> None:
        """Puts them into `token_ids` of the next step, where those are below 0."""
        assert self.last is not None, "the last step drew no tokens on the device"
        arguments = {"token_ids": token_ids, "drawn": self.last, "num_rows": len(token_ids), "BLOCK": _BLOCK}
        self._launch(put_in, (-(-len(token_ids) // _BLOCK),), arguments, num_warps=4, num_stages=1)


Int32Array = NDArray[np.int32]

_EDIT: Final = Struct(f"={len(PENALTIES)}f{EDIT_WORDS - len(PENALTIES)}i")
_WORD_BYTES: Final = 4
_UNKNOWN: Final = -1
"""Value for token ids that int32 cannot hold: no row has them."""


class EditTable:
    """The edits of a step. Token ids that the model does not have are kept, and do nothing."""

    def __init__(self, draws: Sequence[DrawParams], masks: Mapping[int, bytes] | None, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masks: list[Int32Array] = []
        self._lists: list[bytes] = []
        self._num_tokens = 0
        self.numbers = [NONE] * len(draws)
        """Number of each row's edit."""
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
        """The numbers of the mask of tokens that the grammar and `allowed_token_ids` both allow."""
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
