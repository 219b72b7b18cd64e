"""Blocks of a prompt that another replica computes meanwhile: they are asked for ahead of the request."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from holdfast.worker.engine import sendings as sendings_module
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.tier_mover import Place, TierShape
from holdfast.worker.request import BlockSource, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from tests.worker.engine.engines import make_engine, make_request
from tests.worker.engine.played_tier import BLOCK_BYTES, PROMPT, Played, PlayedMover, finished
from tests.worker.engine.test_sendings import THERE, begin, full

__all__ = ["full"]  # a fixture

COMPUTING = THERE._replace(is_computing=True)


def fetched(played: Played) -> list[tuple[str, int]]:
    """Attempts that the listener was told of, and tokens."""
    played.idle()
    return [tuple(one) for update in played.listener.updates for one in update.fetched_ahead]


def told_ahead(
    played: Played,
    name: str,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = (),
    source: BlockSource = COMPUTING,
) -> None:
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling_params=SamplingParams(max_tokens=20, seed=1),
        block_source=source,
    )
    played.core.fetch_ahead(request, 0.0, played.listener, name)


def test_who_wants_blocks_ahead_is_told_once_they_are_here():
    played = Played()
    told_ahead(played, "a", PROMPT[:20], PROMPT[20:])
    assert played.mover.asked == {1: played.names()}, "those of its output too"
    assert fetched(played) == []
    played.tier.restores.note_piece(1)
    assert fetched(played) == [("a", 32)]
    assert fetched(played) == [("a", 32)], "once"
    told_ahead(played, "b")
    assert fetched(played)[1:] == [("b", 32)], "nothing is missing"


def test_who_wants_blocks_ahead_is_told_how_many_have_come():
    played = Played()
    played.mover.missing = set(played.names()[5:])
    told_ahead(played, "a")
    played.tier.restores.note_piece(1)
    assert fetched(played) == [("a", 20)]
    told_ahead(played, "b")
    played.tier.restores.cut(2)
    assert fetched(played)[1:] == [("b", 20)]


def test_who_wants_blocks_ahead_of_a_replica_that_fetches_none_is_told_at_once():
    played = Played(computing_s=0.0)
    told_ahead(played, "a")
    assert fetched(played) == [("a", 0)]
    played.core.detach(played.listener)
    told_ahead(played, "b")
    assert fetched(played) == [("a", 0)]


def test_who_wants_blocks_ahead_for_which_there_is_no_room_any_more_is_told():
    played = Played(num_blocks=12)
    told_ahead(played, "a")
    played.submit("b", tuple(range(100, 130)))
    assert played.core.scheduler.plan() is not None
    assert fetched(played) == []
    played.tier.restores.note_piece(1)
    assert fetched(played) == [("a", 0)]
    assert played.mover.num_taken == 0


def ahead(played: Played, now: float = 0.0, **fields) -> None:
    params = SamplingParams(max_tokens=2, seed=1)
    later = EngineRequest(
        request_id="later", prompt_token_ids=PROMPT, sampling_params=params, block_source=COMPUTING, **fields
    )
    played.core.fetch_ahead(later, now)


def test_blocks_of_finished_chunks_go_while_the_next_are_computed(full, monkeypatch):
    monkeypatch.setattr(sendings_module, "MIN_BYTES", BLOCK_BYTES)
    computing = Played(max_num_batched_tokens=8)
    number = begin(computing, full.names(), waits=True)
    computing.idle()
    assert (computing.mover.sent.get(number), computing.mover.ended) == (None, set())
    computing.submit("now")
    sent_before_the_end = []
    send = computing.mover.send

    def noted(number: int, places: Sequence[Place]) -> None:
        sent_before_the_end.append(not computing.listener.deltas and bool(places))
        send(number, places)

    monkeypatch.setattr(computing.mover, "send", noted)
    computing.run(step_s=0.1)
    computing.idle()
    assert any(sent_before_the_end), "a chunk of 8 tokens is two blocks"
    assert computing.mover.sent[number] == full.names()
    assert computing.mover.ended == {number}


def test_blocks_that_nobody_computes_are_waited_for_no_longer_than_from_one_to_the_next(full):
    full.mover.sending_room = True
    number = begin(full, [*full.names(), b"k" + bytes(16)], waits=True)
    full.idle(9.0)
    assert full.mover.sent[number] == full.names()
    full.idle(18.9)
    assert not full.mover.ended
    full.idle(19.0)
    assert full.mover.ended == {number}


def test_a_request_that_comes_later_finds_what_came_ahead():
    played = Played()
    ahead(played)
    assert played.mover.asked == {1: played.names()}
    played.tier.restores.note_piece(1)
    played.idle()
    assert not played.tier.moves
    played.submit("later", block_source=THERE)
    assert list(played.mover.asked) == [1], "nothing is left to ask for"
    played.run()
    assert (finished(played), played.stats.num_prefix_hit_tokens) == ({"later"}, 32)


def test_a_request_that_comes_while_blocks_do_waits_for_them_no_longer_than_computing_takes():
    played = Played(computing_s=1.0)
    ahead(played)
    played.idle(30.0)
    assert played.tier.moves, "nobody waits for them"
    played.submit("later", now=30.0, block_source=THERE)
    assert list(played.mover.asked) == [1]
    played.idle(30.9)
    assert not played.core.scheduler.has_work
    played.idle(31.0)
    played.run()
    assert finished(played) == {"later"}
    assert not played.tier.moves


def test_what_comes_ahead_is_left_where_it_has_no_room_and_ends_by_itself():
    small = Played(num_blocks=8)
    ahead(small)
    assert small.mover.asked == {1: small.names()}, "nothing else is there"
    small.idle(59.9)
    assert small.tier.moves
    small.idle(60.0)
    assert not small.tier.moves
    small.submit("running", tuple(range(40, 60)))
    small.core.scheduler.plan()
    ahead(small)
    assert list(small.mover.asked) == [1]


def test_what_comes_ahead_needs_room_beside_waiting_requests_and_does_not_wait_for_them():
    played = Played()
    played.submit("just now", tuple(range(40, 60)))
    ahead(played)
    assert list(played.mover.asked) == [1]
    for num_blocks, is_asked in ((17, False), (18, True)):
        small = Played(num_blocks=num_blocks)
        small.submit("running", (90, 91, 92))
        assert small.core.scheduler.plan() is not None
        small.submit("just now", tuple(range(40, 65)))
        ahead(small)  # nine blocks, beside one that is used and the seven of the other, and one for each that waits
        assert bool(small.mover.asked) == is_asked


@pytest.mark.parametrize("runs_on", [False, True])
def test_what_others_fetch_counts_unless_the_request_runs_on_meanwhile(runs_on):
    played = Played(computing_s=0.04)
    told_ahead(played, "other", tuple(range(100, 150)))  # twelve blocks in 34 ms
    told_ahead(played, "a", source=COMPUTING._replace(is_leaving=runs_on))  # eight in 26, behind them in 50
    assert (len(played.mover.asked) == 2) == runs_on


def test_who_waits_for_blocks_is_told_of_them_at_once_and_not_after_the_next_step():
    engine, _, recorder = make_engine(is_started=False)
    mover, scheduler = PlayedMover(), engine._core.scheduler
    of_scheduler = lambda *_: 1.0, scheduler.num_awaited_blocks, scheduler.can_preempt, scheduler.pinning
    engine.tier.put_below(BlockTier(*scheduler.caches, mover, TierShape(block_bytes=1), *of_scheduler, has_store=False))
    told: list[object] = []
    recorder.on_update = lambda update: told.extend(one.attempt for one in update.fetched_ahead)
    engine.submit(make_request("runs"), recorder)
    engine._take_commands()
    later = replace(make_request("later", range(20)), block_source=COMPUTING)
    engine._core.fetch_ahead(later, engine.now(), recorder, "later")
    engine._turn()
    engine._core.tier.restores.note_piece(1)
    assert not told
    engine._turn()
    assert told == ["later"]
