"""What else goes over the link: heartbeats, what is cached, statistics, and orders of operators."""

import logging
import threading

import grpc
import pytest

from holdfast.worker.block_hash import HashChain
from holdfast.worker.log_level import PACKAGE
from tests.worker.replica.link_peer import BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S, over_a_link


def test_a_busy_replica_beats_although_its_engine_is_stuck(engine, monkeypatch):
    """The heart is on the event loop: an engine held up in a step stops the counter and not the beat."""
    released = threading.Event()
    run = engine._runner.run

    def stuck(plan):
        assert released.wait(TIMEOUT_S)
        return run(plan)

    monkeypatch.setattr(engine._runner, "run", stuck)

    async def scenario(router, server):
        await router.submit(1)
        try:
            await router.read_until(lambda: len(router.heartbeats) >= 5)
            assert len({heartbeat.progress for heartbeat in router.heartbeats[1:]}) == 1
        finally:
            released.set()
        await router.read_until(lambda: 1 in router.finished)

    over_a_link(engine, scenario)


def test_a_router_that_asks_hears_what_is_cached_in_messages_of_bounded_size(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[1] * 19_000, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)
        assert not router.cached, "it has not asked"
        await router.follow_cache()
        await router.read_until(lambda: len(router.cached) == 19_000 // BLOCK_SIZE)
        assert router.max_cache_events == 4096
        chain = HashChain("")
        last = chain.hash_of(4000, [1] * 19_000, BLOCK_SIZE)
        assert int.from_bytes(last[:8], "little") in router.cached

    over_a_link(engine, scenario)


def test_a_replica_is_killed_by_a_router_only_if_it_was_started_for_that(engine):
    killed = []

    async def scenario(router, server):
        await router.kill()
        await router.submit(1, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)

    over_a_link(engine, scenario)
    assert not killed
    over_a_link(engine, scenario, on_kill=lambda: killed.append(True))
    assert killed == [True]


def test_a_router_that_passes_on_an_operators_order_changes_what_is_logged(engine):
    async def scenario(router, server):
        await router.set_log_level("DEBUG")
        await router.submit(1, max_tokens=1)
        await router.read_until(lambda: 1 in router.finished)
        assert logger.level == logging.DEBUG
        await router.set_log_level("loud")
        with pytest.raises(grpc.aio.AioRpcError, match="log_level"):
            await router.read_until(lambda: False)
        assert logger.level == logging.DEBUG

    logger = logging.getLogger(PACKAGE)
    level = logger.level
    try:
        over_a_link(engine, scenario)
    finally:
        logger.setLevel(level)


def test_statistics_come_up_the_link(engine):
    async def scenario(router, server):
        await router.submit(1, prompt=[1] * 9, max_tokens=3)
        await router.read_until(lambda: router.stats is not None and router.stats.num_finished == 1)
        stats = router.stats
        assert (stats.num_requests, stats.num_tokens_generated, stats.num_prefix_query_tokens) == (1, 3, 9)
        assert (stats.num_cached_blocks, stats.num_used_blocks, stats.num_free_blocks) == (2, 0, NUM_BLOCKS)
        assert stats.step_time_s > 0

    over_a_link(engine, scenario)
