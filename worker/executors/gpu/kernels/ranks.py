"""Triton kernels over the memory of several ranks: sums, gathers, and words of the leader, each in one launch.

Each rank has a share that all ranks reach: flags, and two slots of blocks of WORDS. Program p has block b if
b % PROGRAMS == p, at any size, so that it meets the programs p of other ranks and nobody else: it counts its launches
(its epoch), writes its blocks into the slot of this epoch's parity, sets its flag on every rank, waits for the flags of
all ranks, and reads.

- What is read was written: the flag is released after a barrier behind the writes, and acquired before one ahead of the
  reads.
- What is read is not written again too early: a rank writes into the same slot two epochs later, after it has seen all
  flags of the epoch between. A rank sets that flag after it has read.
- The epoch lies on the device and counts what ran, so a CUDA graph that is replayed goes on counting. It wraps: flags
  are compared by their distance, since a rank may be one epoch ahead, and never more.
- A rank that does not come is waited for `max_polls` times, or until the host says so in `lost`. Then what is read
  means nothing, and `lost` says which rank it was.
- No program waits for one that has no room on its device: there are fewer programs than multiprocessors.
"""

import triton
import triton.language as tl

from holdfast.worker.executors.gpu.kernels.layers import tree_of

PROGRAMS = tl.constexpr(64)
WORDS = tl.constexpr(1024)
"""Words of a block."""
FLAGS = tl.constexpr(512)
"""Words of a share before its slots: a flag for each program of each rank."""
LOOK_EVERY = tl.constexpr(128)
"""Polls between two looks at the host's flag."""


@triton.jit
def slot_of(peers, rank, epoch, slot_words):
    """The slot of an epoch in the share of a rank, as words."""
    share = tl.load(peers + rank).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(share, 16) + (FLAGS + (epoch & 1) * slot_words)


@triton.jit
def num_behind(flags, epoch):
    """Which of some ranks have not reached an epoch, as ones."""
    return (tl.atomic_add(flags, 0, sem="acquire", scope="sys") - epoch < 0).to(tl.int32)


@triton.jit
def meet(peers, lost, program, epoch, rank, max_polls, RANKS: tl.constexpr):
    """Waits until this program has reached this epoch on all ranks."""
    ranks = tl.arange(0, RANKS)
    tl.debug_barrier()
    theirs = tl.load(peers + ranks).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + rank * PROGRAMS + program, epoch, sem="release", scope="sys")
    flags = tl.load(peers + rank).to(tl.pointer_type(tl.int32)) + ranks * PROGRAMS + program
    behind = num_behind(flags, epoch)
    polls = 0
    while (tl.max(behind, 0) > 0) & (polls < max_polls):
        polls += 1
        if polls % LOOK_EVERY == 0:  # noqa: SIM102 - `and` would look each time
            if tl.load(lost, volatile=True) != 0:
                polls = max_polls
        behind = num_behind(flags, epoch)
    missing = tl.min(tl.where(behind > 0, ranks, RANKS), 0)
    if missing < RANKS:  # noqa: SIM102 - likewise
        if tl.load(lost, volatile=True) == 0:
            tl.store(lost, (missing + 1).to(tl.int64))
    tl.debug_barrier()


@triton.jit
def part_of(peers, rank, epoch, slot_words, places, mask):
    """A rank's part of a sum."""
    slot = slot_of(peers, rank, epoch, slot_words)
    return tl.load(slot + places, mask=mask, other=0).to(tl.float32, bitcast=True)


@triton.jit
def tree_of_ranks(peers, epoch, slot_words, places, mask, RANKS: tl.constexpr):
    """The parts of 1, 2, 4 or 8 ranks, added as `tree_of` adds."""
    total = part_of(peers, 0, epoch, slot_words, places, mask)
    if RANKS >= 2:
        total = total + part_of(peers, 1, epoch, slot_words, places, mask)
    if RANKS >= 4:
        third = part_of(peers, 2, epoch, slot_words, places, mask)
        total = total + (third + part_of(peers, 3, epoch, slot_words, places, mask))
    if RANKS >= 8:
        fifth = part_of(peers, 4, epoch, slot_words, places, mask)
        left = fifth + part_of(peers, 5, epoch, slot_words, places, mask)
        seventh = part_of(peers, 6, epoch, slot_words, places, mask)
        total = total + (left + (seventh + part_of(peers, 7, epoch, slot_words, places, mask)))
    return total


@triton.jit(do_not_specialize=["rank", "max_polls"])
def add_over_ranks(
    parts,  # [PARTS, values], float32: this rank's slices
    out,  # [values], float32: may be `parts` where PARTS is 1
    peers,  # [RANKS], int64: where this rank finds the share of each
    epochs,  # [PROGRAMS], int32: launches that the programs of this rank have seen
    lost,  # [1], int64, in memory of the host: 0, or 1 + the first rank that did not come, or below 0: give up
    num_values,  # specialized: rows of a model are multiples of 16, which are read 4 at a time
    slot_words,  # of one slot; a multiple of WORDS
    max_polls,
    rank,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTERS: tl.constexpr,
):
    """The sum of all slices of all ranks, as one binary tree. Grid: (programs,), at most PROGRAMS.

    With SCATTERS each rank adds its share of the blocks alone, and the ranks read the sums in a second epoch: the same
    additions, and 2 / RANKS of the bytes. Each epoch has separate flags, and fewer writes and reads than others.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    own = slot_of(peers, rank, epoch, slot_words)
    for start in range(program * WORDS, num_values, PROGRAMS * WORDS):
        places = start + tl.arange(0, WORDS)
        mask = places < num_values
        total = tree_of(parts, num_values, places, mask, PARTS)
        tl.store(own + places, total.to(tl.int32, bitcast=True), mask=mask)
    meet(peers, lost, program, epoch, rank, max_polls, RANKS)
    if SCATTERS:
        sums = slot_of(peers, rank, epoch + 1, slot_words)
        first = (rank + RANKS - program % RANKS) % RANKS  # its round: other programs have others, to share any size
        for start in range((first * PROGRAMS + program) * WORDS, num_values, RANKS * PROGRAMS * WORDS):
            places = start + tl.arange(0, WORDS)
            mask = places < num_values
            total = tree_of_ranks(peers, epoch, slot_words, places, mask, RANKS)
            tl.store(sums + places, total.to(tl.int32, bitcast=True), mask=mask)
        epoch += 1
        meet(peers, lost, program, epoch, rank, max_polls, RANKS)
    for start in range(program * WORDS, num_values, PROGRAMS * WORDS):
        places = start + tl.arange(0, WORDS)
        mask = places < num_values
        if SCATTERS:
            owner = (start // (PROGRAMS * WORDS) + program) % RANKS
            total = part_of(peers, owner, epoch, slot_words, places, mask)
        else:
            total = tree_of_ranks(peers, epoch, slot_words, places, mask, RANKS)
        tl.store(out + places, total, mask=mask)
    tl.store(epochs + program, epoch)


@triton.jit(do_not_specialize=["num_words", "width", "rank", "max_polls"])
def gather_over_ranks(
    words,  # [words], int32
    out,  # [words * RANKS], int32
    peers,  # likewise, and so on, as of `add_over_ranks`
    epochs,
    lost,
    num_words,
    width,
    slot_words,
    max_polls,
    rank,
    RANKS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """All ranks' words, in rank order within each `width` of them; on ranks that receive. Grid: as of a sum."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    own = slot_of(peers, rank, epoch, slot_words)
    for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
        places = start + tl.arange(0, WORDS)
        mask = places < num_words
        tl.store(own + places, tl.load(words + places, mask=mask, other=0), mask=mask)
    meet(peers, lost, program, epoch, rank, max_polls, RANKS)
    if RECEIVES:
        for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
            places = start + tl.arange(0, WORDS)
            mask = places < num_words
            targets = (places // width) * (RANKS * width) + places % width
            for peer in tl.static_range(RANKS):
                found = tl.load(slot_of(peers, peer, epoch, slot_words) + places, mask=mask, other=0)
                tl.store(out + targets + peer * width, found, mask=mask)
    tl.store(epochs + program, epoch)


@triton.jit(do_not_specialize=["num_words", "rank", "max_polls"])
def take_from_leader(
    words,  # [words], int32: the leader's are given, those of others are replaced
    peers,  # likewise, and so on, as of `add_over_ranks`
    epochs,
    lost,
    num_words,
    slot_words,
    max_polls,
    rank,
    RANKS: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Words of the leader on all ranks. All set flags, also programs without data: a flag tells that a rank has read
    the previous data. Grid: as of a sum.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    slot = slot_of(peers, 0, epoch, slot_words)
    if LEADS:
        for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
            places = start + tl.arange(0, WORDS)
            mask = places < num_words
            tl.store(slot + places, tl.load(words + places, mask=mask, other=0), mask=mask)
    meet(peers, lost, program, epoch, rank, max_polls, RANKS)
    if not LEADS:
        for start in range(program * WORDS, num_words, PROGRAMS * WORDS):
            places = start + tl.arange(0, WORDS)
            mask = places < num_words
            tl.store(words + places, tl.load(slot + places, mask=mask, other=0), mask=mask)
    tl.store(epochs + program, epoch)
