"""A model whose layers keep states says the same, to the last bit, whatever its requests share and go through."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.executors.cpu.states import StateCache
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.request import EngineRequest, Priority
from tests.parity.harness import load, on_ranks
from tests.parity.hybrids import Said, drafting_config, request, run_all, save_hybrid, scheduler_of, start, told_alone

NUM_NEW = 14
SHARED = 66
"""Tokens that prompts have in common: above what a snapshot is worth, and no multiple of a block."""


@pytest.fixture(scope="module", params=["conv, attention, conv", "by key heads, mixture", "granite, mixture", "falcon"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def leader(folder) -> LeaderRunner:
    """With room for drafts."""
    return load(drafting_config(folder))


@pytest.fixture(scope="module")
def requests(prompts) -> list[EngineRequest]:
    """Short ones, and two that have the beginning of a long one."""
    long = prompts[0]
    assert len(long) >= SHARED
    texts = [*prompts, long[:SHARED] + prompts[2], long[:SHARED] + prompts[1] * 3]
    return [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def alone(leader, requests) -> Said:
    """What each is told by itself, without a cache."""
    return told_alone(leader, requests)


SETTINGS = {
    "together": {},
    "in chunks of 7": {"max_num_batched_tokens": 8},
    "a token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "with two slots": {"num_state_slots": 2},
    "in one memory": {"state_blocks": 3},
    "in little memory": {"state_blocks": 9, "num_blocks": 40},
    "with drafts": {"drafts": 8},
    "without a cache": {"prefix_caching": False},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", SETTINGS)
def test_requests_are_told_the_same_in_any_company(name, leader, requests, alone):
    scheduler = scheduler_of(leader, **SETTINGS[name])
    assert run_all(scheduler, leader, requests) == alone
    if "drafts" in name:
        assert scheduler.stats().num_draft_tokens > 0


@pytest.mark.in_turn
@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_they_are_told_the_same(drafts, prefix_caching, leader, requests, alone):
    """By one of a better class that finds no place."""
    scheduler = scheduler_of(leader, drafts, max_num_seqs=2, prefix_caching=prefix_caching)
    first = start(scheduler, leader, [replace(each, priority=Priority.LOW) for each in requests[1:3]], num_steps=9)
    rest = run_all(scheduler, leader, [requests[0]])
    assert {name: first.get(name, []) + said for name, said in rest.items()} == {
        name: alone[name] for name in ("0", "1", "2")
    }
    assert scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("drafts", [0, 8])
def test_from_snapshots_they_are_told_the_same(drafts, leader, requests, alone):
    scheduler = scheduler_of(leader, drafts)
    for each in (*requests, *requests):  # the first time they learn where prompts part
        assert run_all(scheduler, leader, [each]) == {each.request_id: alone[each.request_id]}
    assert scheduler.stats().num_snapshot_hits >= 4


def test_after_each_of_its_tokens_a_request_goes_on_elsewhere(leader, requests, alone):
    whole = requests[0]
    said = alone[whole.request_id]
    for count in (1, 5, NUM_NEW - 1):
        tokens = tuple(token.token_id for token in said[:count])
        rest = run_all(scheduler_of(leader), leader, [replace(whole, output_token_ids=tokens)])
        assert rest[whole.request_id] == said[count:]


def test_forks_are_told_what_they_are_told_alone(leader, prompts):
    siblings = [
        replace(one, sampling_params=replace(one.sampling_params, seed=number), group_id="group")
        for number, one in enumerate(request(str(number), prompts[2], NUM_NEW) for number in range(3))
    ]
    ungrouped = [replace(one, group_id="") for one in siblings]
    apart = [run_all(scheduler_of(leader, prefix_caching=False), leader, [one]) for one in ungrouped]
    scheduler = scheduler_of(leader, prefix_caching=False)
    assert run_all(scheduler, leader, siblings) == {name: said for each in apart for name, said in each.items()}
    assert scheduler.stats().num_forked_tokens == 2 * (len(prompts[2]) - 1)


def test_in_one_memory_they_are_told_the_same(folder, requests, alone):
    """As it is by default: with so little of it that blocks and snapshots make way for each other all the time."""
    config = drafting_config(folder)
    cache = config.cache.model_copy(update={"num_state_slots": None, "num_blocks": 96})
    leader = load(config.model_copy(update={"cache": cache}))
    info, needs = leader._runner.info, MemoryEstimator(config.model_copy(update={"cache": cache}))
    room = needs.state_room(config.model_copy(update={"cache": cache}), 1 << 20)
    assert (info.state_blocks, info.num_state_slots) == (room.state_blocks, 96 // room.state_blocks)
    scheduler = scheduler_of(leader, 8)
    for _ in range(2):
        assert run_all(scheduler, leader, requests) == alone
    stats = scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks == 96
    assert stats.num_cached_slots * info.state_blocks + stats.num_cached_blocks <= 96


def test_ranks_share_snapshots(folder, requests, alone):
    def twice(leader: LeaderRunner) -> list[Said]:
        scheduler = scheduler_of(leader, 8)
        return [run_all(scheduler, leader, requests) for _ in range(2)]

    assert on_ranks(drafting_config(folder, 2), twice) == [alone, alone]


def test_a_window_that_is_off_by_one_after_a_chunk_shows(leader, requests, alone, monkeypatch):
    """Planted: between two steps each slot's inputs move by a position."""
    run = leader.run

    def shifted(plan):
        result = run(plan)
        for pool in states.pools:
            rows = pool[:, : columns * row]
            rows.copy_(rows.unflatten(1, (columns, row)).roll(1, 1).flatten(1))
        return result

    executor = leader._runner.backend.executor
    states: StateCache = executor._states
    state, layer = executor._kept_states[0], executor.packed.layers[executor._state_layers[0]]
    columns, row = (layer.conv or layer.recurrence).contents.columns, state.state_length(1) - state.state_length(0)
    monkeypatch.setattr(leader, "run", shifted)
    assert run_all(scheduler_of(leader, max_num_batched_tokens=8), leader, requests[:1]) != {"0": alone["0"]}
