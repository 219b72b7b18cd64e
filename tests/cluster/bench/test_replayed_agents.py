"""Agents with more context than memory holds, in virtual time: nearly all that was seen before comes from the cache or
the store.
"""

import pytest

from holdfast.cluster.bench.agents import AgentWorkload
from holdfast.cluster.bench.summary import Turns, turns
from tests.cluster.bench.replayed_agents import Replay
from tests.worker.engine.played_tier import bring_back_as_all_others


def replayed(seed: int, *, has_mistake: bool = False) -> Turns:
    """Eight sessions of 900 tokens at first and 2,000 at last, in a memory of 3,200."""
    workload = AgentWorkload.scaled(0.01, pause_scale=0.1, num_turns=30, seed=seed)
    assert isinstance(workload, AgentWorkload)
    replay = Replay(workload, num_agents=8, num_blocks=200)
    if has_mistake:
        bring_back_as_all_others(replay.tier)
    replay.run()
    return turns(replay.records)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_sessions_in_a_memory_for_two_find_what_they_have_seen(seed):
    found = replayed(seed)
    assert found.hit_rate >= 0.97 * found.seen_rate


def test_blocks_that_come_back_and_are_evicted_at_once_are_seen_in_the_hit_rate():
    found = replayed(0, has_mistake=True)
    assert found.hit_rate < 0.97 * found.seen_rate
