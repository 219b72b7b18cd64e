"""Blocks that go to other replicas, and prefixes that come from them: what is asked for, when, and how it ends."""

from collections.abc import Sequence

import pytest

from holdfast.worker.cache.prefix_cache import HashChain
from holdfast.worker.engine import restores
from holdfast.worker.engine import sendings as sendings_module
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.restore import Expected
from holdfast.worker.engine.tier_mover import KV, TierShape
from holdfast.worker.request import BlockSource
from tests.worker.engine.engines import BLOCK_SIZE, make_engine, make_request
from tests.worker.engine.played_tier import BLOCK_BYTES, PROMPT, Played, PlayedMover, finished

THERE = BlockSource("there:1", 1000)


@pytest.fixture
def full() -> Played:
    """Its cache has the prompt's blocks."""
    full = Played()
    full.submit("computed")
    full.run()
    return full


def begin(played: Played, names: Sequence[bytes] | None = None, now: float = 0.0, **times: float) -> int:
    times = {"lasts_s": 10.0, **times}
    return played.tier.sendings.begin(played.names() if names is None else names, now, **times)


def engine_with(mover: PlayedMover, block_bytes: int) -> Engine:
    engine, _, recorder = make_engine(is_started=False)
    scheduler = engine._core.scheduler
    tier = BlockTier(
        *scheduler.caches,
        mover,
        TierShape(block_bytes=block_bytes),
        lambda *_: 1e9,
        scheduler.num_awaited_blocks,
        scheduler.can_preempt,
        scheduler.pinning,
        has_store=False,
    )
    engine.tier.put_below(tier)
    engine.submit(make_request("computed", range(20), max_tokens=3), recorder)
    engine._take_commands()
    return engine


# --- what goes ---


def test_after_the_last_step_an_engine_sends_the_rest_before_it_waits_for_a_command():
    mover = PlayedMover()
    engine = engine_with(mover, block_bytes=10**9)  # no step pays for one
    name = KV + HashChain("").hash_of(0, range(20), BLOCK_SIZE)
    engine._core.tier.sendings.begin([name], engine.now(), 60.0, waits=True)
    while engine._core.scheduler.has_work:
        assert not mover.sent
        engine._turn()
    assert mover.sent == {1: [name]}


def test_an_idle_replica_sends_all_that_is_asked_for_in_order(full):
    number = begin(full)
    full.idle()
    assert full.mover.sent[number] == full.names()
    assert full.mover.ended == {number}
    assert not full.tier.moves


def test_a_block_that_is_not_here_ends_the_sending_behind_those_before_it(full):
    names = full.names()
    number = begin(full, [*names[:3], b"k" + bytes(16), *names[4:]])
    full.idle()
    assert full.mover.sent[number] == names[:3]
    assert full.mover.ended == {number}


def test_nothing_is_sent_longer_than_was_said(full):
    full.mover.sending_room = False
    number = begin(full, lasts_s=2.0)
    full.idle(1.9)
    assert not full.mover.ended
    full.idle(2.0)
    assert full.mover.ended == {number}


def test_what_is_found_are_the_first_blocks(full):
    names = full.names()
    assert full.tier.sendings.found([*names[:3], b"k" + bytes(16), *names[4:]]) == names[:3]
    assert full.tier.sendings.found([b"k" + bytes(16), *names]) == []


def test_a_replica_that_is_gone_is_sent_nothing(full):
    full.mover.sending_room = None
    number = begin(full)
    full.idle()
    assert (full.mover.sent[number], full.mover.ended) == ([], {number})


def test_without_room_it_goes_on_later(full):
    full.mover.sending_room = False
    number = begin(full)
    full.idle()
    assert number not in full.mover.sent
    full.mover.sending_room = True
    full.idle()
    assert full.mover.sent[number] == full.names()


def test_running_requests_pay_a_share_of_their_steps(full, monkeypatch):
    monkeypatch.setattr(sendings_module, "MIN_BYTES", BLOCK_BYTES)
    number = begin(full)
    full.submit("running", (90, 91, 92))
    full.run(step_s=0.01)  # three steps give 0.9 ms; a block costs 1 ms
    assert len(full.mover.sent.get(number, ())) == 0
    full.submit("longer", (93, 94, 95))
    full.run(step_s=0.1)
    assert 1 <= len(full.mover.sent[number]) < 8 + 1
    full.idle()
    assert full.mover.sent[number] == full.names()


def test_what_connections_take_of_the_processor_is_paid_too(full, monkeypatch):
    """A block costs 1 ms here and 7 ms of another thread, half of which is the steps': one in 0.15 s of steps."""
    monkeypatch.setattr(sendings_module, "MIN_BYTES", BLOCK_BYTES)
    full.mover.counts.send_s_per_byte = 7e-6 * full.tier.sendings._shape.num_threads / 2
    number = begin(full)
    full.submit("running", (90, 91, 92))
    full.run(step_s=0.1)  # three steps
    assert len(full.mover.sent[number]) == 2


def test_what_a_block_costs_beyond_the_budget_is_paid_by_the_next_steps(full, monkeypatch):
    monkeypatch.setattr(sendings_module, "MIN_BYTES", BLOCK_BYTES // 4)
    number = begin(full)
    for steps in range(1, 5):
        full.submit(f"running {steps}", (90, 91, 92 + steps))
        full.run(step_s=0.01)
        assert len(full.mover.sent.get(number, ())) <= 1 + 0.03 * 0.01 * 4 * steps / 1e-3


def test_a_replica_that_leaves_pays_more(full, monkeypatch):
    monkeypatch.setattr(sendings_module, "MIN_BYTES", BLOCK_BYTES)
    number = begin(full, is_leaving=True)
    full.submit("running", (90, 91, 92))
    full.run(step_s=0.01)
    assert 1 <= len(full.mover.sent[number]) <= 4, "three steps give 3 ms"


def test_evicted_blocks_are_not_held_for_a_sending():
    small = Played(num_blocks=12)
    small.submit("computed")
    small.run()
    small.mover.sending_room = False
    number = begin(small)
    small.submit("other", tuple(range(40, 73)))
    small.run()
    small.mover.sending_room = True
    small.idle()
    assert small.mover.ended == {number}
    assert small.mover.sent[number] == small.names()[: len(small.mover.sent[number])] != small.names()
    small.core.check_integrity()


def test_other_weights_end_all(full):
    full.mover.sending_room = False
    number = begin(full)
    full.core.forget_cache()
    assert full.mover.ended == {number}


# --- what comes ---


def test_a_prefix_that_another_replica_has_is_asked_for():
    played = Played()
    played.submit("a", block_source=THERE)
    assert played.mover.asked == {1: played.names()}
    assert not played.core.scheduler.has_work
    played.tier.restores.note_piece(1)
    played.idle()
    played.run()
    assert finished(played) == {"a"}
    assert (played.stats.num_received_tokens, played.stats.num_prefix_hit_tokens) == (32, 32)
    assert played.stats.num_disk_hit_tokens == 0


def test_the_store_goes_first_where_it_has_as_much():
    played = Played()
    played.tier.learn(played.names(), ())
    played.submit("a", block_source=THERE)
    assert (list(played.mover.fetched), played.mover.asked) == ([1], {})


def test_what_is_here_is_not_asked_for():
    played = Played()
    played.submit("before")
    played.run()
    played.submit("a", block_source=THERE)
    assert played.mover.asked == {}


def test_where_no_other_replica_can_be_asked_it_is_computed():
    played = Played()
    played.mover.can_ask = False
    played.submit("a", block_source=THERE)
    played.run()
    assert finished(played) == {"a"}


def test_what_is_computed_sooner_is_not_asked_for():
    played = Played(computing_s=0.001)
    played.submit("a", block_source=THERE)
    assert played.mover.asked == {}


def test_a_replica_that_has_less_than_was_said_sends_that():
    played = Played()
    played.submit("a", block_source=THERE)
    names = played.names()[:5]
    assert played.tier.restores.settle(1, 5) == Expected(names, names, 0)
    played.tier.restores.note_piece(1)
    played.idle()
    played.run()
    assert (finished(played), played.stats.num_received_tokens) == ({"a"}, 20)


def test_what_nobody_waits_for_any_more_is_not_received():
    played = Played()
    assert played.tier.restores.settle(1, 5) is None
    played.submit("a", block_source=THERE)
    assert played.tier.restores.settle(1, 0) is None
    played.idle()
    played.run()
    assert finished(played) == {"a"}


def test_a_source_that_has_less_is_asked_for_as_much():
    played = Played()
    played.submit("a", block_source=BlockSource("there:1", 10))
    assert played.mover.asked == {1: played.names()[: 10 // (len(PROMPT) // 8)]}


def test_a_transfer_that_is_cut_is_computed_at_once():
    played = Played()
    played.submit("a", block_source=THERE)
    played.tier.restores.cut(1)
    played.idle(0.001)
    played.run()
    assert finished(played) == {"a"}
    assert not played.tier.moves


def test_pieces_that_came_before_the_cut_are_used():
    played = Played()
    played.mover.missing = set(played.names()[5:])
    played.submit("a", block_source=THERE)
    played.tier.restores.note_piece(1)
    played.tier.restores.cut(1)
    played.idle()
    played.run()
    assert finished(played) == {"a"}
    assert played.stats.num_received_tokens == 20


def test_a_silent_replica_is_waited_for_no_longer_than_computing_takes():
    played = Played(computing_s=1.0)
    played.submit("a", block_source=THERE)
    played.idle(0.9)
    assert not played.core.scheduler.has_work
    played.idle(1.0)
    played.run()
    assert finished(played) == {"a"}
    assert played.mover.fetched[1] == (), "what comes later is not wanted"


def test_an_aborted_request_leaves_nothing_open():
    played = Played()
    played.submit("a", block_source=THERE)
    played.core.abort("a")
    assert not played.tier.moves
    assert played.mover.fetched[1] == ()


def received(played: Played, name: str, source: BlockSource, *, is_cut: bool = False) -> None:
    played.submit(name, block_source=source)
    ticket = max(played.mover.asked)
    if not is_cut:
        played.tier.restores.note_piece(ticket)
    played.tier.restores.cut(ticket)
    played.idle()
    played.run()
    played.core.forget_cache()


def test_tokens_are_counted_by_who_sent_them_and_transfers_that_brought_less():
    played = Played()
    received(played, "a", THERE)
    received(played, "b", BlockSource("other:1", 1000))
    received(played, "c", THERE)
    stats = played.stats
    assert stats.received_tokens_from == {"other:1": 32, "there:1": 64}
    assert (stats.num_received_tokens, stats.num_cut_transfers) == (96, 0)
    received(played, "d", BlockSource("third:1", 1000), is_cut=True)
    assert played.stats.num_cut_transfers == 1
    assert played.stats.received_tokens_from == stats.received_tokens_from


def test_the_last_senders_alone_are_remembered(monkeypatch):
    monkeypatch.setattr(restores, "MAX_SENDERS", 2)
    played = Played()
    for name in ("there", "b", "there", "c"):
        received(played, f"{name} {len(played.mover.asked)}", BlockSource(f"{name}:1", 1000))
    assert played.stats.received_tokens_from == {"there:1": 64, "c:1": 32}
