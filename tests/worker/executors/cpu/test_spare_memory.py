"""Spare memory: what one object leaves is what the next one gets."""

from holdfast.worker.executors.cpu.spare_memory import MOST_BYTES, SpareMemory
from holdfast.worker.executors.cpu.tile_memory import mapped_memory

SIZE = 5 << 20


def test_memory_is_used_again_by_objects_that_it_fits():
    spare, memory = SpareMemory(), mapped_memory(SIZE)
    spare.give(memory)
    assert spare.take(SIZE - 7) is memory
    assert spare.take(SIZE) is not memory, "one object has it"
    for num_bytes in (SIZE + (1 << 20), SIZE // 3):
        spare.give(memory)
        other = spare.take(num_bytes)
        assert other is not memory
        assert len(other) >= num_bytes


def test_fresh_memory_is_made_ready_once():
    spare = SpareMemory()
    spare.prepare(SIZE)
    preparing = spare.preparing
    spare.prepare(SIZE)
    assert spare.preparing is preparing
    preparing.join(60)
    memory = spare.take(SIZE)
    assert memory[:SIZE] == bytes(SIZE)
    spare.prepare(SIZE)
    assert spare.preparing is not preparing
    assert spare.take(SIZE) is not memory
    spare.preparing.join(60)
    assert not spare.preparing.is_alive(), "memory in use is made ready no more"


def test_large_memory_is_not_kept():
    spare, memory = SpareMemory(), mapped_memory(MOST_BYTES)
    spare.give(memory)
    assert spare.take(MOST_BYTES) is not memory
    spare.prepare(MOST_BYTES)
    assert spare.preparing is None


def test_memory_that_was_left_is_as_good_as_fresh():
    spare = SpareMemory()
    spare.give(memory := mapped_memory(SIZE))
    spare.prepare(SIZE)
    assert spare.preparing is None
    assert spare.take(SIZE) is memory
