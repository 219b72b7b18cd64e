"""Blocks that come from several ranks: regrouped, in order, and ended once, whichever sender fails."""

import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from holdfast.worker.engine import outgoing_blocks
from holdfast.worker.engine.block_frames import Block
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.incoming_blocks import IncomingBlocks, Sender, Taker, Transfer
from holdfast.worker.engine.restore import Expected
from holdfast.worker.engine.tier_mover import KV
from holdfast.worker.engine.transfer_key import TransferKey
from holdfast.worker.engine.transfer_shares import RankShare, SendingReplica, read_heads
from holdfast.worker.executors.block_layout import BlockLayout, Heads, PageForm
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.library import load_library

LIMIT_S = 20.0
PAGE = PageForm(keys=32, values=32, value_tiles=2)
TWO: list[Heads] = [((0,),), ((1,),)]
ONE: list[Heads] = [((0, 1),)]
NAMES = [b"k" + bytes([number]) * 16 for number in range(6)]


def layout(heads: Heads) -> BlockLayout:
    return BlockLayout(numbers="any", pages=(PAGE,), block_size=16, heads=heads)


class Receiving:
    """A rank that receives."""

    def __init__(self, transfer: Transfer) -> None:
        self.blocks: list[Block] = []
        self.ends: list[Exception | None] = []
        self.over = threading.Event()
        self.incoming = IncomingBlocks(transfer, self._take, self._end)
        self.incoming.start()

    def _take(self, blocks: Sequence[Block]) -> bool:
        self.blocks += blocks
        return True

    def _end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.over.set()


@pytest.fixture
def servers() -> Iterator[list[BlockServer]]:
    servers = [BlockServer("127.0.0.1") for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


def there(servers: Sequence[BlockServer], heads: Sequence[Heads]) -> SendingReplica:
    return SendingReplica([("127.0.0.1", server.port) for server in servers], heads, 16)


KEY = TransferKey(b"t" * 16, b"k" * 32)
ROWS = [np.frombuffer(os.urandom(2 * PAGE.unit_bytes), np.uint8) for _ in NAMES]


def halves(part: int) -> list[Block]:
    """What each rank of two has."""
    return [(name, layout(ONE[0]).cut(row, TWO[part])) for name, row in zip(NAMES, ROWS, strict=True)]


def from_two(servers: Sequence[BlockServer]) -> tuple[list[TransferKey], Receiving]:
    """One rank that takes from two, to which it is known; and their keys."""
    share = RankShare(layout(ONE[0]), 0, ONE)
    keys = []
    for rank, server in enumerate(servers):
        (taker,) = RankShare(layout(TWO[rank]), rank, TWO).takers(KEY, ONE)
        assert taker.cut is None
        server.offer(taker.key)
        keys.append(taker.key)
    return keys, Receiving(share.transfer(KEY, there(servers, TWO), Expected(NAMES, NAMES, 0)))


def test_rows_are_whole_once_all_ranks_have_sent_their_part(servers):
    keys, receiving = from_two(servers)
    servers[0].send(keys[0].transfer, halves(0))
    servers[1].send(keys[1].transfer, halves(1)[:2])
    servers[1].send(keys[1].transfer, halves(1)[2:])
    assert receiving.over.wait(LIMIT_S)
    assert receiving.ends == [None]
    assert [name for name, _ in receiving.blocks] == NAMES
    assert all(np.array_equal(row, whole) for (_, row), whole in zip(receiving.blocks, ROWS, strict=True))


def test_a_rank_that_ends_early_ends_what_can_be_had_without_an_error(servers):
    keys, receiving = from_two(servers)
    servers[0].send(keys[0].transfer, halves(0)[:3])
    servers[0].end(keys[0].transfer)
    servers[1].send(keys[1].transfer, halves(1))
    assert receiving.over.wait(LIMIT_S)
    assert receiving.ends == [None]
    assert [name for name, _ in receiving.blocks] == NAMES[:3]


def test_a_rank_that_fails_ends_all_at_once_and_is_told_of_once(servers):
    keys, receiving = from_two(servers)
    servers[1].send(keys[1].transfer, [(name, row[:-1]) for name, row in halves(1)])
    servers[0].send(keys[0].transfer, halves(0)[:1])
    assert receiving.over.wait(LIMIT_S)
    while servers[0].is_open(keys[0].transfer):
        servers[0].send(keys[0].transfer, halves(0)[1:2])
    assert [type(error) for error in receiving.ends] == [ValueError]
    assert receiving.blocks == []


def test_closed_it_tells_of_no_error(servers):
    _, receiving = from_two(servers)
    receiving.incoming.close()
    assert receiving.over.wait(LIMIT_S)
    assert receiving.ends == [None]


def test_equal_ranks_have_one_connection_each_and_nothing_is_made_anew():
    for rank in range(2):
        share = RankShare(layout(TWO[rank]), rank, TWO)
        ((key, cut),) = share.takers(KEY, TWO)
        assert (key, cut) == (KEY.of_rank(rank), None)
        replica = SendingReplica([("a", 1), ("b", 2)], read_heads([[[0]], [[1]]]), 16, is_computing=True)
        transfer = share.transfer(KEY, replica, Expected(NAMES, NAMES, 0))
        assert transfer == Transfer([Sender(replica.addresses[rank], key)], NAMES, NAMES, None, is_computing=True)


def test_keys_of_ranks_differ_and_are_those_of_the_transfer():
    keys = [KEY.of_rank(rank) for rank in range(3)] + [TransferKey(b"u" * 16, b"k" * 32).of_rank(0)]
    assert len({key.transfer for key in keys}) == len({key.key for key in keys}) == 4
    assert KEY.of_rank(1) == TransferKey(KEY.transfer, KEY.key).of_rank(1)


def test_one_rank_sends_each_of_two_its_heads_and_ends_once_one_wants_nothing_more():
    rows = np.stack(ROWS)
    mover = BlockMover(None, {KV: BlockBytes([rows], load_library())})
    port = mover.outgoing.listen("127.0.0.1")
    takers = RankShare(layout(ONE[0]), 0, ONE).takers(KEY, TWO)
    assert len(takers) == 2
    mover.outgoing.offer(1, takers)
    mover.outgoing.send(1, list(zip(NAMES[:4], range(4), strict=True)))
    servers = SendingReplica([("127.0.0.1", port)], ONE, 16)
    expected = Expected(NAMES, NAMES, 0)
    receiving = [
        Receiving(RankShare(layout(TWO[rank]), rank, TWO).transfer(KEY, servers, expected)) for rank in range(2)
    ]
    mover.outgoing.send(1, list(zip(NAMES[4:], range(4, 6), strict=True)))
    for rank, one in enumerate(receiving):
        assert one.over.wait(LIMIT_S)
        assert [row.tobytes() for _, row in one.blocks] == [row.tobytes() for _, row in halves(rank)]
    while mover.outgoing.has_room(1) is not None:  # a connection that is closed is noticed by what is sent
        mover.outgoing.send(1, [(NAMES[0], 0)])
    mover.outgoing.send(1, ())
    mover.close()


def test_a_rank_with_nothing_for_the_other_replica_sends_nothing():
    mover = BlockMover(None, {KV: BlockBytes([np.stack(ROWS)], load_library())})
    mover.outgoing.listen("127.0.0.1")
    mover.outgoing.offer(1, [])
    assert mover.outgoing.has_room(1) is None
    mover.outgoing.send(1, [(NAMES[0], 0)])
    mover.outgoing.send(1, ())
    mover.close()


def test_a_slow_taker_ends_the_transfer_at_the_bound(monkeypatch):
    monkeypatch.setattr(outgoing_blocks, "MAX_STAGED_BYTES", 5 * ROWS[0].size)
    mover = BlockMover(None, {KV: BlockBytes([np.stack(ROWS)], load_library())})
    mover.outgoing.listen("127.0.0.1")
    mover.outgoing.offer(1, [Taker(KEY.of_rank(rank)) for rank in range(2)])
    for number, name in enumerate(NAMES):
        mover.outgoing.send(1, [(name, number)])
    assert mover.outgoing.has_room(1) is None, "nobody has taken any of them"
    mover.close()
