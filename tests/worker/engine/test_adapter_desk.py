"""Adapters of an engine's core, with loads that tests end by hand: who is told that one is resident, and when."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.worker.adapter import Adapter
from holdfast.worker.block_hash import short_adapter
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.held_requests import AdapterDesk
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.step_update import CacheChanges
from tests.worker.schedulers import make_request, make_result, make_scheduler

NUM_SLOTS = 2


class Listener:
    """A follower of the cache."""


class Bench:
    """A core that serves adapters, and the loads that it has ordered."""

    def __init__(self) -> None:
        self.core, self.listener, self.now = EngineCore(make_scheduler()), Listener(), 0.0
        self.loads: dict[str, int] = {}
        self.failure: Exception | None = None
        slots, in_use = self.core.scheduler.adapter_slots, self.core.adapters_in_use
        desk = AdapterDesk(NUM_SLOTS, slots, in_use, self._fetch, self._take, self._later, lambda: self.now)
        self.core.serve_adapters(desk)
        self.core.attach(self.listener)
        self.core.follow_cache(self.listener)
        self.told()

    def _fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None]) -> None:
        self.loads[adapter.name] = ticket

    def _take(self, ticket: int, slot: int) -> Exception | None:
        return self.failure

    def _later(self, ticket: int) -> Callable[[], None]:
        return lambda: None

    def ask(self, name: str) -> None:
        request = replace(make_request(f"for {name}", max_tokens=1), adapter=Adapter(name, name, "folder"))
        self.core.submit(request, self.listener, self.now)

    def loaded(self, name: str) -> None:
        self.core.adapter_loaded(self.loads.pop(name))

    def run(self) -> None:
        while (plan := self.core.scheduler.plan(self.now)) is not None:
            self.core.commit(plan, make_result(plan), 0.1)

    def told(self) -> CacheChanges:
        """Changes of adapters that the listener is told now."""
        changes = [update.cache for _, update in self.core.take_updates()]
        known = {short_adapter(name) for name in "abc"}
        stored = [one for each in changes for one in each.stored if one in known]
        return CacheChanges(stored=stored, evicted=[one for each in changes for one in each.evicted if one in known])


@pytest.fixture
def bench():
    return Bench()


def stored(*names: str) -> CacheChanges:
    return CacheChanges(stored=[short_adapter(name) for name in names], evicted=[])


def test_an_adapter_is_told_when_its_load_begins_and_when_another_takes_its_slot(bench):
    bench.ask("a")
    assert bench.told() == stored("a")
    bench.loaded("a")
    bench.ask("b")
    assert bench.told() == stored("b")
    bench.loaded("b")
    bench.run()
    bench.ask("c")
    assert bench.told() == CacheChanges(stored=[short_adapter("c")], evicted=[short_adapter("a")])


def test_one_that_cannot_be_loaded_is_taken_back(bench):
    bench.ask("a")
    assert bench.told() == stored("a")
    bench.failure = ConfigurationError("it is broken")
    bench.loaded("a")
    updates = dict(bench.core.take_updates())
    assert updates[bench.listener].cache.evicted == [short_adapter("a")]
    assert isinstance(updates[bench.listener].rejections[0].error, InvalidRequestError)
    assert bench.core.scheduler.stats().num_resident_adapters == bench.core.scheduler.stats().num_adapter_loads == 0


def test_a_late_follower_is_told_all_of_them(bench):
    bench.ask("a")
    bench.loaded("a")
    bench.ask("b")
    other = Listener()
    bench.core.attach(other)
    bench.core.follow_cache(other)
    assert set(dict(bench.core.take_updates())[other].cache.stored) >= {short_adapter("a"), short_adapter("b")}


def test_loads_are_counted_and_timed(bench):
    bench.ask("a")
    bench.now = 0.25
    bench.loaded("a")
    stats = bench.core.scheduler.stats()
    assert (stats.num_adapter_loads, stats.num_resident_adapters, stats.adapter_load_s) == (1, 1, 0.25)


def adapter(name: str) -> Adapter:
    return Adapter(name, name, "folder", pinned=True)


def resident(bench: Bench) -> set[str]:
    return set(bench.core.scheduler.adapter_slots)


def test_a_pinned_adapter_is_loaded_without_a_request_and_keeps_its_slot(bench):
    bench.core.adapters.keep([adapter("a")])
    assert bench.told() == stored("a")
    bench.loaded("a")
    ((_, update),) = bench.core.take_updates()
    assert update.stats is not None, "told without a step"
    assert (update.stats.num_resident_adapters, update.stats.num_adapter_loads) == (1, 1)
    assert bench.core.take_updates() == []
    for name in "bcb":
        bench.ask(name)
        bench.loaded(name)
        bench.run()
        assert resident(bench) == {"a", name}
    bench.core.adapters.keep([])  # no longer: it is the one that was not used for the longest time
    bench.ask("c")
    bench.loaded("c")
    assert resident(bench) == {"b", "c"}


def test_a_pinned_adapter_waits_for_a_slot_and_takes_it_first(bench):
    for name in "ab":
        bench.ask(name)
        bench.loaded(name)
    bench.core.adapters.keep([adapter("c")])
    assert "c" not in bench.loads
    bench.run()
    assert list(bench.loads) == ["c"]
    bench.loaded("c")
    assert "c" in resident(bench)
    bench.core.adapters.keep([adapter("c")])
    assert not bench.loads, "it is here"


def test_one_slot_stays_for_others(bench, caplog):
    bench.core.adapters.keep([adapter("a"), adapter("b")])
    assert "adapter b is not pinned: of 2 slots one must stay free" in caplog.text
    bench.loaded("a")
    bench.ask("b")
    bench.loaded("b")
    bench.run()
    bench.ask("c")
    bench.loaded("c")
    assert resident(bench) == {"a", "c"}


def test_a_pinned_adapter_that_cannot_be_loaded_is_told_in_the_log_and_tried_again_with_a_request(bench, caplog):
    bench.failure = ConfigurationError("its folder is gone")
    bench.core.adapters.keep([adapter("a")])
    bench.loaded("a")
    assert "adapter a stays out of memory, although it is pinned: " in caplog.text
    assert "its folder is gone" in caplog.text
    assert not bench.loads
    bench.failure = None
    bench.ask("a")
    bench.loaded("a")
    bench.run()
    for name in "bc":
        bench.ask(name)
        bench.loaded(name)
        bench.run()
    assert resident(bench) == {"a", "c"}


def test_a_pin_that_ends_while_it_waits_for_a_slot_loads_nothing(bench):
    for name in "ab":
        bench.ask(name)
        bench.loaded(name)
    bench.core.adapters.keep([adapter("c")])
    bench.core.adapters.keep([])
    bench.run()
    assert not bench.loads
