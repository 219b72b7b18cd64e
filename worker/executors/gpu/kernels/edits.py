"""Triton kernels that edit rows of logits before draws: masks, bans, bias, penalties, as the native editor does.

`worker/executors/cpu/native/edits.h` has the order and the arithmetic. Masks are not written into a row: the kernels of
draws read them beside it. `restore_rows` undoes the edits, since log-probabilities are raw.
"""

import triton
import triton.language as tl

from holdfast.worker.draws import PENALTIES
from holdfast.worker.executors.gpu.kernels.exact import float_at, flushed
from holdfast.worker.executors.gpu.kernels.reports import CHUNK, EDITS, RECORD, chunk_of

REPETITION_PENALTY = tl.constexpr(PENALTIES.index("repetition_penalty"))
FREQUENCY_PENALTY = tl.constexpr(PENALTIES.index("frequency_penalty"))
PRESENCE_PENALTY = tl.constexpr(PENALTIES.index("presence_penalty"))
"""The places of a row's penalties among the words of its edits, and those of the others."""
PENALIZES = tl.constexpr(len(PENALTIES))
FIRST = tl.constexpr(PENALIZES + 1)  # of its tokens: outputs, prompt, biased, banned; then the biases
NUM_OUTPUTS = tl.constexpr(PENALIZES + 2)
NUM_PROMPT = tl.constexpr(PENALIZES + 3)
NUM_BIASED = tl.constexpr(PENALIZES + 4)
NUM_BANNED = tl.constexpr(PENALIZES + 5)
GRAMMAR = tl.constexpr(PENALIZES + 6)  # its mask; -1: none
ALLOWED = tl.constexpr(PENALIZES + 7)  # the mask of allowed tokens that the grammar allows too; -1: none
EDIT = tl.constexpr(PENALIZES + 8)

_PROMPT = tl.constexpr(1 << 30)
"""Bit added to the count of a token that the prompt has."""


@triton.jit
def tokens_at(tokens, first, start, count, vocab):
    """CHUNK tokens of a list and their places in it. Entries beyond the row's are masked out."""
    places = first + start + tl.arange(0, CHUNK)
    token = tl.load(tokens + places, mask=places < first + count, other=-1)
    return places, token, (token >= 0) & (token < vocab)


@triton.jit
def any_left(row, vocab, num_chunks, mask, keeps):
    """1 if a token that the mask keeps has a logit above -inf."""
    found = tl.cast(0, tl.int32)
    chunk = tl.cast(0, tl.int32)
    while (found == 0) & (chunk < num_chunks):
        _, x = chunk_of(row, chunk, vocab, mask, keeps, True)
        found = tl.max((x > -float("inf")).to(tl.int32), 0)
        chunk += 1
    return found


@triton.jit
def penalized(value, count, repetition, frequency, presence):
    """A logit after its penalties; `count` is how often the output has its token."""
    value = flushed(tl.where(value > 0, tl.div_rn(value, repetition), value * repetition))
    return tl.where(count > 0, flushed(flushed(value - frequency * count.to(tl.float32)) - presence), value)


@triton.jit
def penalize(row, edit, tokens, counts, first, vocab):
    """Each token once: who takes its count away changes its logit."""
    num_outputs = tl.load(edit + NUM_OUTPUTS)
    count = num_outputs + tl.load(edit + NUM_PROMPT)
    for start in range(0, count, CHUNK):
        places, token, is_known = tokens_at(tokens, first, start, count, vocab)
        is_output = places < first + num_outputs
        tl.atomic_add(counts + token, 1, mask=is_known & is_output, sem="relaxed")
        tl.atomic_or(counts + token, _PROMPT, mask=is_known & ~is_output, sem="relaxed")
    tl.debug_barrier()
    repetition = float_at(edit + REPETITION_PENALTY)
    frequency, presence = float_at(edit + FREQUENCY_PENALTY), float_at(edit + PRESENCE_PENALTY)
    for start in range(0, count, CHUNK):
        places, token, is_known = tokens_at(tokens, first, start, count, vocab)
        taken = tl.atomic_xchg(counts + token, 0, mask=is_known, sem="relaxed")
        is_own = is_known & (taken != 0)
        value = flushed(tl.load(row + token, mask=is_own, other=0.0))
        after = penalized(value, taken & (_PROMPT - 1), repetition, frequency, presence)
        tl.store(row + token, after, mask=is_own)


@triton.jit
def ban(row, edit, tokens, saved, first, vocab, num_chunks, mask, keeps):
    """-inf for banned tokens, unless that leaves none. NaN and infinity stay: the row is broken."""
    count = tl.load(edit + NUM_BANNED)
    for start in range(0, count, CHUNK):
        places, token, is_known = tokens_at(tokens, first, start, count, vocab)
        is_fine = tl.load(saved + places, mask=is_known, other=0.0) < float("inf")
        tl.store(row + token, -float("inf"), mask=is_known & is_fine)
    tl.debug_barrier()
    if (count > 0) & (any_left(row, vocab, num_chunks, mask, keeps) == 0):
        for start in range(0, count, CHUNK):
            places, token, is_known = tokens_at(tokens, first, start, count, vocab)
            tl.store(row + token, tl.load(saved + places, mask=is_known), mask=is_known)
        tl.debug_barrier()


@triton.jit
def edit_rows(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    edits,  # [edits, EDIT], int32
    tokens,  # lists of tokens, int32; an edit knows its own
    saved,  # the logits of these tokens as they were, float32
    masks,  # [masks, mask words], int32: a bit for each token, the lowest first: it may come next
    kept,  # [rows], int32: the mask of a row; -1: none
    counts,  # [rows, vocab], int32: zeros, before and after
    stride,
    vocab,
    num_chunks,
    mask_words,
):
    """Edits each row that has an edit, in place. Grid: (rows,)."""
    program = tl.program_id(0).to(tl.int64)
    row, number = logits + program * stride, tl.load(records + program * RECORD + EDITS)
    keeps = tl.cast(-1, tl.int32)
    if number >= 0:
        edit = edits + number * EDIT
        first = tl.load(edit + FIRST)
        num_biased = tl.load(edit + NUM_BIASED)
        before_biased = tl.load(edit + NUM_OUTPUTS) + tl.load(edit + NUM_PROMPT)
        count = before_biased + num_biased + tl.load(edit + NUM_BANNED)
        for start in range(0, count, CHUNK):
            places, token, is_known = tokens_at(tokens, first, start, count, vocab)
            tl.store(saved + places, tl.load(row + token, mask=is_known), mask=is_known)
        keeps = tl.load(edit + GRAMMAR)
        allowed = tl.load(edit + ALLOWED)
        if allowed >= 0:
            own = masks + allowed.to(tl.int64) * mask_words
            if keeps < 0 or any_left(row, vocab, num_chunks, own, allowed) > 0:
                keeps = allowed
        tl.debug_barrier()
        mask = masks + tl.maximum(keeps, 0).to(tl.int64) * mask_words
        ban(row, edit, tokens, saved, first + before_biased + num_biased, vocab, num_chunks, mask, keeps)
        for start in range(0, num_biased, CHUNK):
            places, token, is_known = tokens_at(tokens, first + before_biased, start, num_biased, vocab)
            bias = tl.load(tokens + first + count + start + tl.arange(0, CHUNK), mask=is_known, other=0)
            value = flushed(tl.load(row + token, mask=is_known, other=0.0))
            tl.store(row + token, flushed(value + bias.to(tl.float32, bitcast=True)), mask=is_known)
        tl.debug_barrier()
        if tl.load(edit + PENALIZES) > 0:
            penalize(row, edit, tokens, counts + program * vocab, first, vocab)
    tl.store(kept + program, keeps)


@triton.jit
def restore_rows(
    logits,  # [rows, stride], float32
    records,  # [rows, RECORD], int32
    edits,  # [edits, EDIT], int32
    tokens,
    saved,
    stride,
    vocab,
):
    """Puts back what `edit_rows` has changed. Grid: (rows,)."""
    program = tl.program_id(0).to(tl.int64)
    row, number = logits + program * stride, tl.load(records + program * RECORD + EDITS)
    if number >= 0:
        edit = edits + number * EDIT
        count = tl.load(edit + NUM_OUTPUTS) + tl.load(edit + NUM_PROMPT)
        count += tl.load(edit + NUM_BIASED) + tl.load(edit + NUM_BANNED)
        first = tl.load(edit + FIRST)
        for start in range(0, count, CHUNK):
            places, token, is_known = tokens_at(tokens, first, start, count, vocab)
            tl.store(row + token, tl.load(saved + places, mask=is_known), mask=is_known)


@triton.jit(do_not_specialize=["num_rows"])
def put_in(
    token_ids,  # [rows], int32: below 0, -1 - the row of `drawn` that has the token
    drawn,  # [rows drawn], int32: -1 for a row without a token
    num_rows,
    BLOCK: tl.constexpr,
):
    """A row without a token is followed by token 0; its result is discarded. Grid: (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    token = tl.load(token_ids + rows, mask=is_row, other=0)
    is_pending = is_row & (token < 0)
    known = tl.load(drawn + (-1 - token), mask=is_pending, other=0)
    tl.store(token_ids + rows, tl.maximum(known, 0), mask=is_pending)
