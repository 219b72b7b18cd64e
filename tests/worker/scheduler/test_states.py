"""Slots for states: whatever happens to a sequence, its state is that of its tokens: the pseudo-model would show it."""

from collections.abc import Callable

import pytest

from holdfast.router.dispatch.prefix_index import PrefixHolders, PrefixIndex, PromptPrefix
from holdfast.worker.cache.prefix_cache import CacheFeed
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler import planned_step
from holdfast.worker.scheduler.kept_prefixes import WORTH_A_CUT
from holdfast.worker.scheduler.sequence import Sequence
from tests.worker.scheduler.pseudo_machine import BLOCK_SIZE, NUM_BLOCKS, Machine, tokens

SIZES = {"max_model_len": 256, "eos_token_ids": frozenset(), "arrived_s": 0.0, "attempt": "x"}


def chat(machine: Machine) -> None:
    """A prompt, its repetition, its next turn, and another that parts from it."""
    prompt = tokens(1, 70)
    for name, text in (("first", prompt), ("again", prompt)):
        machine.add(name, text)
        machine.run()
    machine.add("next turn", prompt + machine.got["first"] + tokens(2, 9))
    machine.add("parts", prompt[:42] + tokens(3, 30))
    machine.run()


def forks(machine: Machine) -> None:
    for index in range(3):
        machine.add(f"sibling {index}", tokens(4, 23), group_id="group")
    machine.run()


def with_drafts(machine: Machine) -> None:
    for index in range(3):
        machine.add(str(index), tokens(index, 30), num_tokens=50)
    machine.run()


SITUATIONS: dict[str, tuple[dict, Callable[[Machine], None]]] = {
    "a chat": ({"num_slots": 16}, chat),
    "a chat, few slots": ({"num_slots": 2}, chat),
    "a chat, no cache": ({"num_slots": 4, "prefix_caching": False}, chat),
    "forks": ({"num_slots": 8}, forks),
    "forks, no cache": ({"num_slots": 3, "prefix_caching": False}, forks),
    "forks that come too late": ({"num_slots": 2}, forks),
    "drafts that are right": ({"num_slots": 8, "proposer": "right"}, with_drafts),
    "drafts that are wrong": ({"num_slots": 8, "proposer": "wrong"}, with_drafts),
    "drafts in a chat": ({"num_slots": 16, "proposer": "right"}, chat),
    "preemption": ({"num_slots": 8, "num_blocks": 41}, with_drafts),
    "preemption, with drafts": ({"num_slots": 8, "num_blocks": 41, "proposer": "right"}, with_drafts),
    "one memory: a chat": ({"state_blocks": 2}, chat),
    "one memory: a chat, few blocks": ({"state_blocks": 3, "num_blocks": 40}, chat),
    "one memory: a chat, large states": ({"state_blocks": 20, "num_blocks": 62}, chat),
    "one memory: forks": ({"state_blocks": 3, "num_blocks": 44}, forks),
    "one memory: forks that come too late": ({"state_blocks": 12, "num_blocks": 33}, forks),
    "one memory: preemption": ({"state_blocks": 3, "num_blocks": 50}, with_drafts),
    "one memory: preemption, with drafts": ({"state_blocks": 1, "num_blocks": 44, "proposer": "right"}, with_drafts),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_state_is_that_of_the_tokens(name):
    values, situation = SITUATIONS[name]
    machine = Machine(**values)
    situation(machine)
    assert not machine.wrong
    stats = machine.scheduler.stats()
    assert stats.num_used_slots == 0
    assert stats.num_preemptions > 0 or "preemption" not in name


def test_several_steps_on_one_plan_leave_the_state_of_the_last():
    machine = Machine(4)
    machine.add("a", tokens(1, 10))
    machine.add("b", tokens(2, 13))
    machine.run(max_steps=4)
    assert not machine.wrong


def test_a_repetition_a_turn_and_a_branch_begin_from_snapshots():
    machine = Machine(16)
    prompt = tokens(1, WORTH_A_CUT + 6)

    def computed(name: str, text: bytes) -> int:
        before = machine.scheduler.stats().num_prefix_hit_tokens
        machine.add(name, text)
        machine.run()
        return len(text) - (machine.scheduler.stats().num_prefix_hit_tokens - before)

    assert computed("first", prompt) == len(prompt)
    assert computed("again", prompt) == len(prompt) % BLOCK_SIZE
    history = prompt + machine.got["first"]
    assert computed("next turn", history + tokens(2, 9)) == 9 + len(history) % BLOCK_SIZE + (
        BLOCK_SIZE if len(history) % BLOCK_SIZE == 0 else 0
    )
    branch = prompt[:42] + tokens(3, 30)
    assert computed("parts", branch) == len(branch)  # keys and values up to 40 are there, and no state
    assert computed("parts there too", prompt[:42] + tokens(4, 30)) == 32
    assert not machine.wrong
    assert machine.scheduler.stats().num_snapshot_hits == 3


@pytest.mark.parametrize("behind", [3, WORTH_A_CUT + 9])
def test_a_turn_that_has_another_end_begins_from_the_last_turn(behind):
    """As where a template leaves thoughts out once there is a next turn."""
    machine = Machine(16, turn_ends=(2,))
    turn = tokens(1, WORTH_A_CUT + 5) + b"\2"
    machine.add("first", turn + tokens(2, behind))
    machine.run()
    before = machine.scheduler.stats().num_prefix_hit_tokens
    machine.add("next", turn + tokens(3, 20))
    machine.run()
    assert machine.scheduler.stats().num_prefix_hit_tokens - before == len(turn) // BLOCK_SIZE * BLOCK_SIZE
    assert not machine.wrong


@pytest.mark.parametrize("num_slots", [3, 16])
@pytest.mark.parametrize("num_blocks", [40, NUM_BLOCKS])
def test_routers_know_how_much_of_a_prompt_a_request_begins_with(num_slots, num_blocks):
    """Not what lies behind the deepest snapshot, whatever is evicted."""
    machine, holders, feed = Machine(num_slots, num_blocks=num_blocks), PrefixHolders(), CacheFeed(())
    scheduler, index = machine.scheduler, PrefixIndex(BLOCK_SIZE, holders, 3, has_states=True)
    beginning, num_found = tokens(0, 70), 0
    prompts = [beginning[: 30 + 8 * seed] + tokens(seed, 24 + 3 * seed) for seed in range(8)]
    for number in range(24):
        machine.add(str(number), prompts[number * 5 % len(prompts)], num_tokens=6)
        while machine.step():
            feed.note(scheduler.prefix_cache.take_events(), scheduler.caches[1].take_events())
            changes = feed.take()
            index.apply(changes.stored, changes.evicted)
        for prompt in prompts:
            params = SamplingParams(seed=0, max_tokens=1)
            request = EngineRequest(request_id="x", prompt_token_ids=tuple(prompt), sampling_params=params)
            found = scheduler._queues.cached_prefix(Sequence(10_000, request, **SIZES)).num_tokens
            assert index.num_cached_tokens(PromptPrefix(request)) == found
            assert holders.match(PromptPrefix(request)).num_cached(3) == found
            num_found += found
    whole = CacheFeed(scheduler.prefix_cache.block_hashes, scheduler.caches[1].snapshot_hashes).take()
    assert set(whole.stored) == index.blocks
    assert num_found > 0


def test_only_as_many_run_as_there_are_slots_and_snapshots_make_room_for_them():
    machine = Machine(2)
    for index in range(3):
        machine.add(str(index), tokens(index, 10))
    machine.step()
    machine.step()
    assert machine.scheduler.stats().num_running == 2
    machine.run()
    for index in range(3, 6):  # one after the other: each leaves snapshots
        machine.add(str(index), tokens(index, 80))
        machine.run()
    assert not machine.wrong
    stats = machine.scheduler.stats()
    assert stats.num_snapshot_evictions > 0
    assert (stats.num_used_slots, stats.num_total_slots) == (0, 2)


def test_other_weights_forget_all_snapshots():
    machine = Machine(8)
    machine.add("a", tokens(1, 80))
    machine.run()
    assert machine.scheduler.stats().num_cached_slots > 0
    machine.scheduler.forget_cache()
    assert machine.scheduler.stats().num_cached_slots == 0


# --- mistakes, planted ---


def fork_without_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "take_copy", lambda slots, source: slots.take())


def snapshot_a_step_late(patch: pytest.MonkeyPatch) -> None:
    """Copies are made once the sequence has gone on: by a token, where it decodes."""
    taken, late = StateSlots.take_copies, []

    def take_late(slots: StateSlots):
        late.append(taken(slots))
        return late.pop(0) if len(late) > 1 else ()

    patch.setattr(StateSlots, "take_copies", take_late)


def drafts_taken_for_certain(patch: pytest.MonkeyPatch) -> None:
    """The state goes on past drafts that turn out wrong."""
    planned = planned_step.scheduled_sequence

    def careless(*arguments):
        share = planned(*arguments)
        share.num_drafts = 0
        return share

    patch.setattr("holdfast.worker.scheduler.scheduler.scheduled_sequence", careless)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (fork_without_copy, "forks, no cache"),
        (fork_without_copy, "a chat"),
        (snapshot_a_step_late, "a chat"),
        (drafts_taken_for_certain, "drafts that are wrong"),
    ],
)
def test_a_planted_mistake_shows(mistake, name, monkeypatch):
    mistake(monkeypatch)
    values, situation = SITUATIONS[name]
    machine = Machine(**values)
    situation(machine)
    assert machine.wrong


def test_blocks_and_snapshots_make_way_for_each_other_the_oldest_first():
    """Of four prompts of 18 blocks, each with a snapshot that weighs 30, the last use alone decides."""
    machine = Machine(state_blocks=30, num_blocks=30 + 2 * (18 + 30) + 5)
    prompts = {name: tokens(seed, 72) for seed, name in enumerate("abcd")}

    def found(name: str) -> int:
        before = machine.scheduler.stats().num_prefix_hit_tokens
        machine.add(f"{name} {len(machine.got)}", prompts[name], num_tokens=1)
        machine.run()
        return machine.scheduler.stats().num_prefix_hit_tokens - before

    assert [found(name) for name in "abab"] == [0, 0, 68, 68]
    assert found("c") == 0  # in the place of a, which has been unused for longest
    assert [found("b"), found("c")] == [68, 68]
    assert found("a") == 0
    stats = machine.scheduler.stats()
    assert stats.num_used_blocks == stats.num_used_slots == 0
    assert stats.num_free_blocks == stats.num_total_blocks == 131
    assert not machine.wrong


def test_a_snapshot_goes_with_the_block_before_it():
    machine = Machine(state_blocks=10, num_blocks=60)
    machine.add("a", tokens(1, 72), num_tokens=1)
    machine.run()
    allocator, slots = machine.scheduler.caches
    (snapshot,) = slots.snapshot_hashes
    assert allocator.num_free == 60
    allocator.forget(allocator.prefix_cache.block_of(snapshot))
    assert not list(slots.snapshot_hashes)
    machine.scheduler.check_integrity()


def test_all_memory_can_be_had_for_blocks_and_all_for_states():
    machine = Machine(state_blocks=10, num_blocks=100)
    machine.add("long", tokens(1, 350), num_tokens=9)  # 90 blocks and a state
    machine.run()
    for index in range(8):  # 8 blocks of each and its state: more than 4 do not fit at the same time
        machine.add(str(index), tokens(index, 10), num_tokens=22)
    machine.run()
    assert not machine.wrong
    with pytest.raises(InvalidRequestError, match="360"):
        machine.add("longer", tokens(1, 353), num_tokens=9)


def test_memory_that_is_given_back_too_early_is_noticed(monkeypatch):
    """As if a slot were blank that has a snapshot."""
    take_idle = StateSlots.take_idle
    monkeypatch.setattr(
        StateSlots,
        "take_idle",
        lambda slots: (take_idle(slots)[0], tuple(filter(slots._allocator.is_cached, range(8)))),
    )
    machine = Machine(state_blocks=3)
    chat(machine)
    assert machine.wrong
