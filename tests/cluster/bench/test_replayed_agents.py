"""Agents with more context than memory holds, in virtual time: nearly all that was seen before comes from the cache or
the store.
"""

import pytest

from holdfast.cluster.bench.agents import AgentWorkload
from holdfast.cluster.bench.summary import Turns, turns
from tests.cluster.bench.replayed_agents import Replay
from tests.worker.engine.played_tier import bring_back_as_all_others


def replayed(seed: int, *, keeps: bool = True, has_mistake: bool = False) -> Turns:
    """Eight sessions that have 4.1 to 4.5 times the tokens that memory holds, over all of their turns."""
    workload = AgentWorkload.scaled(0.01, pause_scale=0.1, seed=seed)
    assert isinstance(workload, AgentWorkload)
    replay = Replay(workload, num_agents=8, num_blocks=180, keeps=keeps)
    if has_mistake:
        bring_back_as_all_others(replay.tier)
    replay.run()
    found = turns(replay.records)
    print(
        f"{found.hit_rate:.1%} of prompt tokens from memory or disk, {found.seen_rate:.1%} were of the turn before; "
        f"TTFT of later turns, p95: {found.later_ttft_s.p95:.2f} s"
    )
    return found


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_sessions_with_four_times_the_tokens_of_memory_find_what_they_have_seen(seed):
    found = replayed(seed)
    assert found.hit_rate >= 0.95
    assert found.hit_rate >= 0.98 * found.seen_rate


def test_blocks_that_come_back_and_are_evicted_at_once_are_seen_in_the_hit_rate():
    found = replayed(1, has_mistake=True)
    assert found.hit_rate < 0.98 * found.seen_rate


def test_without_a_store_most_is_computed_again():
    found, recomputed = replayed(0), replayed(0, keeps=False)
    assert recomputed.hit_rate < 0.5 * found.hit_rate
    assert recomputed.later_ttft_s.p95 > 5 * found.later_ttft_s.p95
