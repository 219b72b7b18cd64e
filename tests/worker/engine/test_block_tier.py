"""What goes below the cache and comes back: when, how much, and who waits for it; with a store that the test plays."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine import restores
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.tier_mover import KV, Place, TierShape
from holdfast.worker.request import BlockSource, EngineRequest, FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StateCopy
from holdfast.worker.step_update import EngineStats, StepUpdate
from tests.pseudo_model import PseudoRunner

SIZE = 4
BLOCK_BYTES = 1000
PROMPT = tuple(range(1, 34))
"""Eight blocks, and a token that is always computed."""


class Counts:
    copy_s_per_byte = write_s_per_byte = read_s_per_byte = 1e-6
    received_bytes_per_s: Mapping[str, float] = MappingProxyType({"": 1e6})
    num_blocks = num_bytes = num_failures = num_errors = staged_bytes = num_received_bytes = num_sent_bytes = 0


class PlayedMover:
    """Notes what is asked of it. `missing`: names that are not there when they are taken."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.has_room = True
        self.stored: list[bytes] = []
        self.kept: dict[str, tuple[list[bytes], float]] = {}
        self.fetched: dict[int, Sequence[bytes]] = {}
        self.missing: set[bytes] = set()
        self.can_ask = True
        self.asked: dict[int, Sequence[bytes]] = {}
        self.sent: dict[int, list[bytes]] = {}
        self.ended: set[int] = set()
        self.sending_room: bool | None = True
        self.num_taken = 0

    def store(self, places: Sequence[Place]) -> None:
        self.stored += [name for name, _ in places]

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        self.kept[tenant] = (list(names), ttl_s)

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self.fetched[ticket] = names

    def ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        self.asked[ticket] = names

    def send(self, number: int, places: Sequence[Place]) -> None:
        self.sent.setdefault(number, []).extend(name for name, _ in places)
        if not places:
            self.ended.add(number)

    def sends_room(self, number: int) -> bool | None:
        return self.sending_room

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        self.num_taken += len(places)
        return [name not in self.missing for name, _ in places]


class Listener:
    def __init__(self) -> None:
        self.deltas: list = []

    def on_update(self, update: StepUpdate) -> None:
        self.deltas += update.deltas

    def ask_in_doubt(self) -> bool:
        return False


class Played:
    """A core with a tier. Computing takes `computing_s`."""

    def __init__(self, num_blocks: int = 64, computing_s: float = 1.0, **settings) -> None:
        scheduler = Scheduler(
            SchedulerConfig(**settings),
            num_blocks=num_blocks,
            block_size=SIZE,
            max_model_len=200,
            eos_token_ids=frozenset(),
        )
        self.core = EngineCore(scheduler)
        self.mover = PlayedMover()
        self.computing_s = computing_s
        shape = TierShape(block_bytes=BLOCK_BYTES)
        self.tier = BlockTier(
            *scheduler.caches,
            self.mover,
            shape,
            lambda *_: self.computing_s,
            scheduler.num_waiting,
            scheduler.can_preempt,
            scheduler.pinning,
        )
        self.core.put_below(self.tier)
        self.listener = Listener()
        self.core.attach(self.listener)
        self._runner = PseudoRunner(num_blocks, SIZE)

    def submit(self, name: str, prompt: Sequence[int] = PROMPT, now: float = 0.0, **fields) -> None:
        params = SamplingParams(max_tokens=2, seed=1)
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling_params=params, **fields)
        self.core.submit(request, self.listener, now)

    def run(self, step_s: float = 0.01) -> None:
        """All that is not held."""
        while (plan := self.core.scheduler.plan()) is not None:
            self.core.commit(plan, self._runner.run(plan), step_s)
            self._tell()
            self.core.tend_tier(0.0, step_s)

    def idle(self, now: float = 0.0) -> None:
        self.core.tend_tier(now)
        self._tell()

    def _tell(self) -> None:
        for listener, update in self.core.take_updates():
            listener.on_update(update)

    @property
    def stats(self) -> EngineStats:
        return self.core.scheduler.stats()

    def names(self, prompt: Sequence[int] = PROMPT, **fields) -> list[bytes]:
        """The names of a prompt's blocks."""
        other = Played()
        other.submit("any", prompt, **fields)
        other.run()
        other.idle()
        return [name for name in other.mover.stored if name.startswith(KV)][: (len(prompt) - 1) // SIZE]


@pytest.fixture
def played() -> Played:
    """Its store has the prompt's blocks, and its cache has none."""
    played = Played()
    played.tier.learn(played.names(), ())
    return played


def finished(played: Played) -> set[str]:
    return {delta.attempt for delta in played.listener.deltas if delta.finish_reason is not None}


def bring(played: Played, ticket: int = 1) -> None:
    played.tier.restores.note_piece(ticket)
    played.idle()


def test_a_request_waits_for_its_blocks_and_finds_them(played):
    played.submit("a")
    played.run()
    assert not finished(played)
    assert played.mover.fetched == {1: played.names()}
    bring(played)
    played.run()
    assert finished(played) == {"a"}
    assert (played.stats.num_prefix_hit_tokens, played.stats.num_disk_hit_tokens) == (32, 32)
    first = played.listener.deltas[0]
    assert (first.num_cached_tokens, first.num_disk_tokens) == (32, 32)


def test_what_is_sooner_computed_is_computed(played):
    played.computing_s = 0.004  # reading 8 blocks takes 16 ms
    played.submit("a")
    played.run()
    assert (finished(played), played.mover.fetched) == ({"a"}, {})


def test_two_that_want_the_same_wait_together(played):
    played.submit("a")
    played.submit("b", (*PROMPT[:-1], 99))
    assert len(played.mover.fetched) == 1
    bring(played)
    played.run()
    assert finished(played) == {"a", "b"}
    assert played.stats.num_prefix_hit_tokens == 64


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_nobody_waits_for_blocks_of_another_tenant_or_salt(played, fields):
    played.submit("a", **fields)
    played.run()
    assert (finished(played), played.mover.fetched) == ({"a"}, {})


def test_nobody_waits_longer_than_computing_takes(played):
    played.submit("a", now=10.0)
    played.idle(now=10.9)
    assert not played.core.scheduler.has_work
    assert played.core.most_idle_s(10.9, 60.0) == pytest.approx(0.1)
    played.idle(now=11.0)
    played.run()
    assert finished(played) == {"a"}
    assert played.mover.fetched == {1: ()}, "it is not wanted any more"
    bring(played)  # late
    assert played.mover.num_taken == 0


def test_before_anything_was_measured_the_store_is_believed_and_not_for_ever(played):
    played.computing_s = math.inf
    played.submit("a", now=5.0)
    assert played.core.most_idle_s(5.0, math.inf) == restores.MOST_HELD_S


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_block_that_is_missing_ends_it_there(played, number):
    played.mover.missing = {played.names()[number]}
    played.submit("a")
    bring(played)
    played.run()
    assert finished(played) == {"a"}
    assert played.stats.num_prefix_hit_tokens == played.stats.num_disk_hit_tokens == number * SIZE
    played.submit("b", (*PROMPT, 5))
    played.run()
    assert finished(played) == {"a", "b"}, "what was missing is not asked for again"


def test_one_that_is_aborted_or_whose_listener_leaves_does_not_wait(played):
    played.submit("a")
    played.core.abort("a")
    played.idle()
    (delta,) = played.listener.deltas
    assert (delta.attempt, delta.finish_reason) == ("a", FinishReason.ABORT)
    played.submit("b")
    played.core.detach(played.listener)
    assert played.mover.fetched == {1: (), 2: ()}
    assert not played.core.scheduler.has_work
    played.core.check_integrity()


def test_a_cache_without_room_for_them_computes(played):
    small = Played(num_blocks=12)
    small.tier.learn(small.names(), ())
    small.submit("a")
    small.submit("b", tuple(range(100, 130)))
    plan = small.core.scheduler.plan()
    assert plan is not None
    small.tier.restores.note_piece(1)
    small.idle()
    small.core.commit(plan, small._runner.run(plan), 0.01)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_disk_hit_tokens == 0


OTHER = tuple(range(40, 73))
"""As long as `PROMPT`: a cache of 12 blocks has room for one of them."""


def small_with_both() -> Played:
    small = Played(num_blocks=12)
    small.tier.learn([*small.names(), *small.names(OTHER)], ())
    small.submit("a")
    small.submit("b", OTHER)
    return small


def test_a_restore_that_does_not_fit_beside_another_waits_for_room():
    small = small_with_both()
    assert list(small.mover.fetched) == [1], "the second one waits"
    bring(small)
    small.run()
    assert finished(small) == {"a"}
    assert small.mover.fetched[2] == small.names(OTHER)
    bring(small, 2)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_disk_hit_tokens == 64


def test_restores_that_begin_without_room_evict_each_others_blocks(monkeypatch):
    monkeypatch.setattr(restores.Restores, "_has_room", lambda self, restore: True)
    small = small_with_both()
    small.tier.restores.note_piece(1)
    bring(small, 2)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_prefix_hit_tokens < 64


@pytest.mark.parametrize("worse_runs", [False, True])
def test_beside_a_worse_class_nobody_waits_for_room_longer_than_computing_takes(worse_runs):
    small = Played(num_blocks=12)
    small.tier.learn(small.names(OTHER), ())
    small.submit("a", priority=Priority.LOW if worse_runs else Priority.NORMAL)
    plan = small.core.scheduler.plan()
    small.submit("b", OTHER)
    small.core.commit(plan, small._runner.run(plan), 0.01)
    small.core.tend_tier(small.computing_s - 0.1, 0.01)
    assert not small.mover.fetched
    assert small.core.scheduler.num_waiting(Priority.NORMAL) == 0
    small.core.tend_tier(small.computing_s + 0.1, 0.01)
    assert small.core.scheduler.num_waiting(Priority.NORMAL) == worse_runs
    small.run()
    if not worse_runs:
        bring(small)
        small.run()
    assert finished(small) == {"a", "b"}
    small.core.check_integrity()


def test_tenants_take_turns_in_waiting_for_room():
    small = Played(num_blocks=12)
    prompts = [tuple(range(first, first + len(PROMPT))) for first in (300, 400, 500, 600)]
    tenants = ["many", "many", "many", "one"]
    for prompt, tenant in zip(prompts, tenants, strict=True):
        small.tier.learn(small.names(prompt, tenant=tenant), ())
    for number, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True)):
        small.submit(f"{tenant}-{number}", prompt, tenant=tenant)
    for ticket in (1, 4, 2, 3):
        assert list(small.mover.fetched)[-1] == ticket
        bring(small, ticket)
        small.run()
    assert len(finished(small)) == 4
    assert small.stats.num_disk_hit_tokens == 4 * 32


@pytest.mark.parametrize(("priority", "waits"), [(Priority.LOW, True), (Priority.NORMAL, True), (Priority.HIGH, False)])
def test_a_restore_waits_behind_requests_of_its_class_and_better_ones_alone(priority, waits):
    played = Played(max_num_seqs=1)
    played.tier.learn(played.names(), ())
    for name in ("running", "waiting"):
        played.submit(name, (90, 91, 92))
    assert played.core.scheduler.plan() is not None
    assert played.core.scheduler.num_waiting(Priority.NORMAL) == 1
    played.submit("a", priority=priority)
    assert (1 in played.mover.fetched) != waits


def test_running_requests_pay_a_share_of_their_steps_and_idle_time_is_free():
    played = Played()
    played.submit("a")
    played.run(step_s=0.01)  # 3 steps; a block costs 2 ms
    assert len(played.mover.stored) == 0
    played.submit("b", tuple(range(50, 60)))
    played.run(step_s=0.5)
    assert 4 <= len(played.mover.stored) <= 9
    played.idle()
    assert len(played.mover.stored) == len(set(played.mover.stored)) == 8 + 2
    assert played.stats.disk_backlog_bytes == 0


def test_what_the_store_has_or_had_no_time_for_is_not_copied():
    played = Played(num_blocks=10)
    played.mover.has_room = False
    played.submit("a")
    played.run()
    played.tier.learn(played.names()[:4], ())
    played.submit("b", tuple(range(100, 137)))
    played.run()
    assert played.stats.num_disk_losses == 4
    played.mover.has_room = True
    played.idle()
    assert not set(played.mover.stored) & set(played.names())


def test_followers_hear_of_what_can_be_had_here_or_there(played):
    names = played.names()
    hashes = {name[1:] for name in names}
    assert set(played.tier.block_hashes) == hashes
    played.submit("a")
    bring(played)
    played.run()
    assert played.tier.seen((), ()) == ([], []), "that the store has them was told before"
    played.tier.learn((), names[:2])
    assert played.tier.seen((), ()) == ([], []), "the cache has them still"
    played.tier.forget()
    assert not list(played.tier.block_hashes)


def test_the_known_answers_blocks_stay_here():
    """A replica asks itself the same again and again, each time under a salt of its own."""
    played = Played()
    played.core.numbers_check = played.listener
    played.submit("a", cache_salt="own/1")
    played.run()
    played.core.numbers_check = None
    played.submit("b")
    played.run()
    played.idle()
    assert sorted(played.mover.stored) == sorted(played.names())


def test_what_is_pinned_is_kept_in_the_store_as_long():
    played = Played()
    played.submit("a", cache_ttl_s=300, tenant="gold")
    played.run()
    played.idle()
    names = played.names(tenant="gold")
    assert played.mover.kept == {"gold": (names, 300.0)}
    assert played.mover.stored[: len(names)] == names
