"""Layers with a window have blocks of their own, and give them back: the pseudo-model would show one that is missed."""

import random
from collections.abc import Callable

import pytest

from holdfast.worker.cache.window_blocks import NOTHING_SEEN, WindowBlocks, WindowPrefix
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.model_info import Window, most_tokens
from tests.worker.scheduler.pseudo_machine import Machine, tokens

SIZES = {"equal": (8, 8), "larger for all": (32, 8), "larger for windows": (8, 16)}
WINDOW = 40


def machine_of(sizes: str = "larger for all", **values) -> Machine:
    block_size, of_window = SIZES[sizes]
    window = Window(num_tokens=WINDOW, block_size=of_window, spacing=max(SIZES[sizes]))
    return Machine(window=window, block_size=block_size, **values)


def long_ones(machine: Machine) -> None:
    for index in range(4):
        machine.add(str(index), tokens(index, 150 + 7 * index), num_tokens=100)
    machine.run()


def chat(machine: Machine) -> None:
    """A prompt, its repetition, its next turn, and others that part from it."""
    prompt = tokens(1, 200)
    for name, text in (("first", prompt), ("again", prompt)):
        machine.add(name, text)
        machine.run()
    machine.add("next turn", prompt + machine.got["first"] + tokens(2, 9))
    machine.add("parts", prompt[:130] + tokens(3, 30))
    machine.run()
    machine.add("parts there too", prompt[:130] + tokens(4, 30))
    machine.run()


def forks(machine: Machine) -> None:
    for index in range(3):
        machine.add(f"sibling {index}", tokens(4, 123), group_id="group", num_tokens=90 - 40 * (index == 1))
    machine.run()


def everything(machine: Machine) -> None:
    """Prompts that begin alike, forks, aborts, more than there is room for."""
    rng = random.Random(5)
    for index in range(40):
        prompt = tokens(rng.randrange(3), rng.randrange(1, 180)) + tokens(100 + index, rng.randrange(1, 40))
        group = f"g{index}" if rng.random() < 0.3 else ""
        for sibling in range(2 if group else 1):
            machine.add(f"{index}.{sibling}", prompt, num_tokens=rng.randrange(1, 90), group_id=group)
        for _ in range(rng.randrange(12)):
            machine.step()
        if rng.random() < 0.1:
            machine.scheduler.abort(f"{index}.0")
    machine.run()


SITUATIONS: dict[str, tuple[dict, Callable[[Machine], None]]] = {
    "long ones": ({}, long_ones),
    "long ones, in little memory": ({"num_blocks": 58}, long_ones),
    "long ones, all at once": ({"num_blocks": 400, "max_num_batched_tokens": 512}, long_ones),
    "a chat": ({}, chat),
    "a chat, in little memory": ({"num_blocks": 60}, chat),
    "a chat, no cache": ({"prefix_caching": False}, chat),
    "forks": ({}, forks),
    "forks, no cache": ({"prefix_caching": False}, forks),
    "forks that come too late": ({"max_num_seqs": 2, "prefix_caching": False}, forks),
    "drafts that are right": ({"proposer": "right"}, long_ones),
    "drafts that are wrong": ({"proposer": "wrong"}, long_ones),
    "drafts in a chat": ({"proposer": "right", "num_blocks": 64}, chat),
    "everything": ({"num_blocks": 90}, everything),
    "everything, with drafts": ({"num_blocks": 90, "proposer": "right"}, everything),
    "everything, memory aware": ({"num_blocks": 90, "policy": "memory_aware"}, everything),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_tokens_are_those_of_blocks_that_are_never_given_back(name, sizes):
    values, situation = SITUATIONS[name]
    machine = machine_of(sizes, **values)
    situation(machine)
    assert not machine.wrong
    stats = machine.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_running) == (0, 0)


def test_several_steps_on_one_plan_end_where_a_block_of_either_kind_ends():
    machine = machine_of()
    for index in range(3):
        machine.add(str(index), tokens(index, 30 + index), num_tokens=150)
    machine.run(max_steps=8)
    assert not machine.wrong


def test_a_long_sequence_takes_the_blocks_of_its_window_and_few_more():
    machine = machine_of("equal", num_blocks=512)
    machine.add("long", tokens(1, 300), num_tokens=100)
    machine.step()
    queues, held = machine.scheduler._queues, []
    while queues.running:
        held.append(queues.running[0].window.num_own)
        machine.step()
    assert 8 < max(held) <= queues.windows.window.most_blocks(400) < 400 // 8 / 2


def test_as_many_run_as_memory_has_room_for():
    """Three sequences of 256 tokens: alone, each would need 64 blocks if nothing were given back."""
    machine = machine_of("equal", num_blocks=3 * (32 + 17) + 3)
    for index in range(3):
        machine.add(str(index), tokens(index, 200), num_tokens=56)
    machine.run()
    assert not machine.wrong
    assert machine.scheduler.stats().num_preemptions == 0


def test_a_prefix_is_found_while_what_its_next_token_sees_is_there():
    machine = machine_of(num_blocks=400)
    prompt = tokens(1, 200)

    def computed(name: str, text: bytes) -> int:
        before = machine.scheduler.stats().num_prefix_hit_tokens
        machine.add(name, text)
        machine.run()
        return len(text) - (machine.scheduler.stats().num_prefix_hit_tokens - before)

    assert computed("first", prompt) == 200
    assert computed("again", prompt) == 200 - 192
    assert computed("branch", prompt[:100] + tokens(2, 50)) == 150 - 96
    cache = machine.scheduler._queues.windows.cache
    for block_id in [block for block in cache.contents if block in machine.scheduler._allocator._evictable][:3]:
        machine.scheduler._allocator.make_blank(block_id)
    assert computed("again, with holes", prompt) == 200 - 192
    assert not machine.wrong


def test_where_memory_is_short_what_others_begin_with_is_kept():
    """A system prompt before other prompts, longer than memory holds in all: it is found by those that come third."""
    machine = machine_of(num_blocks=110)
    system = tokens(1, 160)
    hits = []
    for index in range(6):
        before = machine.scheduler.stats().num_prefix_hit_tokens
        machine.add(str(index), system + tokens(10 + index, 200))
        machine.run()
        hits.append(machine.scheduler.stats().num_prefix_hit_tokens - before)
    assert hits[2:] == [160] * 4
    assert not machine.wrong


def test_what_is_too_long_for_memory_is_refused_by_its_length():
    machine = machine_of("equal", num_blocks=50)
    window = machine.scheduler._queues.windows.window
    most = most_tokens(50, 8, window)
    assert most + 8 * window.most_blocks(most) == 400
    machine.add("fits", tokens(1, most - 9), num_tokens=10)
    with pytest.raises(InvalidRequestError, match=f"the KV cache holds {most} in all"):
        machine.add("does not", tokens(1, most - 8), num_tokens=10)
    machine.got.pop("does not")
    machine.run()
    assert not machine.wrong


def test_other_weights_forget_all():
    machine = machine_of()
    chat(machine)
    machine.scheduler.forget_cache()
    assert machine.scheduler.stats().num_cached_blocks == 0
    machine.scheduler.check_integrity()


# --- mistakes, planted ---


def give_back_a_block_too_early(patch: pytest.MonkeyPatch) -> None:
    right = Window.first_block
    patch.setattr(WindowBlocks, "give_back", _careless(WindowBlocks.give_back, right))


def _careless(give_back, first_block):
    def early(blocks, table, num_tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Window, "first_block", lambda window, position: first_block(window, position) + 1)
            patch.setattr(Window, "spacing", 1, raising=False)
            give_back(blocks, table, num_tokens)

    return early


def find_without_a_block_of_the_window(patch: pytest.MonkeyPatch) -> None:
    found = WindowBlocks.find

    def careless(blocks, chain, token_ids, longest):
        end, prefix = found(blocks, chain, token_ids, longest)
        if not prefix.block_ids:
            return end, prefix
        return end, WindowPrefix(prefix.first + 1, prefix.block_ids[1:])

    patch.setattr(WindowBlocks, "find", careless)


def fork_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    def careless(blocks, table, num_tokens):
        first = blocks.window.first_block(num_tokens)
        return WindowPrefix(first, table.block_ids[first : num_tokens // blocks.window.block_size])

    patch.setattr(WindowBlocks, "fork", careless)


def share_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBlocks, "find", lambda blocks, chain, token_ids, longest: (longest, NOTHING_SEEN))


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (give_back_a_block_too_early, "everything"),
        (find_without_a_block_of_the_window, "everything"),
        (fork_what_is_not_there, "forks that come too late"),
        (share_nothing, "a chat"),
    ],
)
def test_a_planted_mistake_shows(mistake, name, monkeypatch):
    mistake(monkeypatch)
    values, situation = SITUATIONS[name]
    machine = machine_of("equal", **values)
    try:
        situation(machine)
    except (AssertionError, IndexError):
        return  # the allocator's own checks
    assert machine.wrong
