"""Blocks that go below the cache and come back change no bit: not after a restart, an eviction, a fork, a failover."""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.worker.cache import sealing
from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.model_runner import ModelRunner, follow
from holdfast.worker.errors import HoldfastError
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineRequest, StoredPin
from holdfast.worker.scheduler.step_time import StepTimeModel
from holdfast.worker.step_update import EngineStats, StepUpdate
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.harness import worker_config
from tests.parity.hybrids import request, save_hybrid

NUM_NEW = 6
LIMIT_S = 30
SMALL = 24
"""Blocks: room for one long prompt."""


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch):
    """Computing a prompt takes a minute, so that whatever the store has is brought back."""
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda *_: float(LIMIT_S))


class Said:
    """What an engine says, and waiting for it."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._open: set[str] = set()
        self._changed = threading.Condition()

    def begin(self, requests: Sequence[EngineRequest]) -> None:
        self._open = {each.request_id for each in requests}
        self.tokens = {each.request_id: list(each.output_token_ids) for each in requests}

    def on_update(self, update: StepUpdate) -> None:
        assert not update.rejections
        with self._changed:
            for delta in update.deltas:
                self.tokens[delta.attempt] += delta.token_ids
                if delta.finish_reason is not None:
                    self._open.discard(delta.attempt)
            self._changed.notify_all()

    def on_failure(self, error: HoldfastError) -> None:
        with self._changed:
            self._open.clear()
            self._changed.notify_all()

    def wait(self) -> dict[str, list[int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._open, LIMIT_S)
        return self.tokens


class Served:
    """A replica, asked by one listener."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._said = Said()
        replica.engine.attach(self._said)

    def ask(self, *requests: EngineRequest) -> dict[str, list[int]]:
        """All at once."""
        self._said.begin(requests)
        for each in requests:
            self.replica.engine.submit(each, self._said)
        return self._said.wait()

    def stats(self) -> EngineStats:
        return self.replica.engine.stats()

    def settle(self) -> EngineStats:
        """Its figures once all that it has computed is on the disk."""
        for _ in range(10_000):
            if (stats := self.stats()).disk_backlog_bytes == 0:
                return stats
        raise AssertionError(f"{stats.disk_backlog_bytes} bytes are not written")


def config(folder: Path, disk: Path | None, size: int = 1, **cache) -> WorkerConfig:
    worker = worker_config(folder, size)
    update = {**cache, **({} if disk is None else {"kv_offload_disk": f"{disk},64MiB"})}
    health = worker.health.model_copy(update={"self_check_every_s": 0.0})
    return worker.model_copy(update={"cache": worker.cache.model_copy(update=update), "health": health})


def num_movers() -> int:
    return sum(thread.name == "holdfast-blocks" for thread in threading.enumerate())


@contextmanager
def served(worker: WorkerConfig) -> Iterator[Served]:
    """A replica until the end of the block; nothing of it looks at its disk afterwards."""
    before = num_movers()
    group = SingleRank()
    replica = Replica.around(worker, ModelRunner.load(worker, group), group)
    try:
        yield Served(replica)
    finally:
        replica.stop()
    assert num_movers() == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def requests(prompts) -> list[EngineRequest]:
    long = (prompts[0] * 4)[:200]
    texts = [long, long[:150] + prompts[1], prompts[2] + long[:120], long[40:]]
    return [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def alone(folder, requests) -> dict[str, list[int]]:
    return told_alone(config(folder, None, enable_prefix_caching=False), requests)


def told_alone(worker: WorkerConfig, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """What each request is told by itself, without a cache."""
    with served(worker) as replica:
        return {name: said for each in requests for name, said in replica.ask(each).items()}


def test_after_a_restart_the_prefix_is_there(folder, requests, alone, tmp_path):
    with served(config(folder, tmp_path)) as first:
        for each in requests:
            assert first.ask(each) == {each.request_id: alone[each.request_id]}
        assert first.settle().num_disk_blocks > 0
    with served(config(folder, tmp_path)) as second:
        for each in requests:
            assert second.ask(each) == {each.request_id: alone[each.request_id]}
        stats = second.stats()
        assert stats.num_disk_hit_tokens >= 192
        assert stats.num_prefix_hit_tokens >= 0.9 * stats.num_prefix_query_tokens
        assert (stats.num_digest_failures, stats.num_disk_errors) == (0, 0)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text, shared keys"])
def test_layers_with_a_window_keep_all_of_it_beside_a_disk(family, requests, tmp_path):
    """Without a disk they give back what no query can see; said is the same."""
    types = ["sliding_attention", "full_attention"] * (3 if "shared" in family else 1)
    changes = {"layer_types": types, "num_hidden_layers": len(types), "sliding_window": 40}
    folder = save_tiny_model(family, tmp_path / "model", max_position_embeddings=512, **changes)
    with served(config(folder, None)) as without:
        assert without.replica.info.window is not None
        alone = {name: said for each in requests for name, said in without.ask(each).items()}
    with served(config(folder, tmp_path / "disk")) as first:
        assert first.replica.info.window is None
        assert first.ask(*requests) == alone
        assert first.settle().num_disk_blocks > 0
    with served(config(folder, tmp_path / "disk")) as second:
        assert second.ask(*requests) == alone
        assert second.stats().num_disk_hit_tokens >= 128


def test_what_was_evicted_comes_back(folder, requests, alone, tmp_path):
    """Memory holds one prompt, and they come in turn."""
    with served(config(folder, tmp_path, num_blocks=SMALL)) as replica:
        for each in (*requests, *requests):
            assert replica.ask(each) == {each.request_id: alone[each.request_id]}
            replica.settle()
        stats = replica.stats()
        assert stats.num_evictions > SMALL
        assert stats.num_disk_hit_tokens >= 250


def test_all_at_once_with_forks(folder, requests, alone, tmp_path):
    group = [replace(requests[0], request_id=f"fork {number}", group_id="forks") for number in range(3)]
    with served(config(folder, tmp_path, num_blocks=SMALL)) as replica:
        for _ in range(3):
            said = replica.ask(*requests, *group)
            assert said == alone | {each.request_id: alone["0"] for each in group}
            replica.settle()
        for each in requests:
            assert replica.ask(each) == {each.request_id: alone[each.request_id]}
        assert replica.stats().num_disk_hit_tokens > 0


def test_a_request_goes_on_elsewhere_with_what_another_replica_stored(folder, requests, alone, tmp_path):
    """Both replicas of a host use one store at the same time."""
    whole = requests[0]
    with served(config(folder, tmp_path)) as first, served(config(folder, tmp_path)) as second:
        first.ask(whole)
        first.settle()
        for _ in range(1000):
            if second.settle().num_disk_blocks == first.stats().num_disk_blocks:
                break
            threading.Event().wait(0.01)
        rest = replace(whole, output_token_ids=tuple(alone["0"][:3]))
        assert second.ask(rest) == {"0": alone["0"]}
        assert second.stats().num_disk_hit_tokens >= 192


def test_keys_and_values_in_int8(folder, requests, tmp_path):
    """Their blocks are of another kind than those of the same tokens in float32."""
    told = told_alone(config(folder, None, enable_prefix_caching=False, kv_cache_dtype="int8"), requests[:2])
    with served(config(folder, tmp_path)) as plain:
        plain.ask(requests[0])
        num_plain = plain.settle().num_disk_blocks
    with served(config(folder, tmp_path, kv_cache_dtype="int8")) as first:
        assert first.ask(*requests[:2]) == told
        assert first.stats().num_disk_hit_tokens == 0
        first.settle()
    with served(config(folder, tmp_path, kv_cache_dtype="int8")) as second:
        assert second.ask(*requests[:2]) == told
        stats = second.settle()
        assert (stats.num_disk_hit_tokens > 0, stats.num_disk_blocks > num_plain > 0) == (True, True)


@pytest.mark.parametrize("pattern", ["conv, attention, conv", "by key heads, mixture", "delta nets alone"])
def test_states_come_back_with_their_blocks(pattern, tmp_path_factory, tmp_path, prompts):
    folder = save_hybrid(tmp_path_factory.mktemp("model"), pattern)
    texts = [prompts[0], prompts[0][:66] + prompts[2], prompts[0][:66] + prompts[1] * 3]
    requests = [request(str(number), text, NUM_NEW) for number, text in enumerate(texts)]
    told = told_alone(config(folder, None, enable_prefix_caching=False), requests)
    for turn in range(3):
        with served(config(folder, tmp_path)) as replica:
            for each in requests:
                assert replica.ask(each) == {each.request_id: told[each.request_id]}
                replica.settle()
            stats = replica.stats()
            assert (stats.num_disk_hit_tokens > 0) == (turn > 0)
            assert stats.num_snapshot_hits > 0


def test_each_rank_keeps_its_share(folder, requests, tmp_path):
    worker = config(folder, tmp_path, size=2)

    def ask(group) -> tuple[dict[str, list[int]], EngineStats] | None:
        runner = ModelRunner.load(worker, group)
        if group.rank > 0:
            follow(runner, group)
            runner.close()
            return None
        replica = Replica.around(worker, runner, group)
        try:
            served = Served(replica)
            return {name: said for each in requests for name, said in served.ask(each).items()}, served.settle()
        finally:
            replica.engine.stop()
            runner.close()

    told, before = run_ranks(2, ask)[0]
    again, after = run_ranks(2, ask)[0]
    assert again == told
    assert (before.num_disk_blocks, after.num_digest_failures) == (after.num_disk_blocks, 0)
    assert after.num_disk_hit_tokens >= 192
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        by_kind = index.execute("SELECT kind, count(*) FROM blocks GROUP BY kind").fetchall()
        assert len({count for _, count in by_kind}) == 1 < len(by_kind), "both ranks have all blocks"
        kind = by_kind[0][0]
        index.execute(
            "DELETE FROM blocks WHERE kind = ? AND number % 2 = 0", (kind,)
        )  # of one rank, the other has them
    again, after = run_ranks(2, ask)[0]
    assert again == told
    assert after.num_disk_hit_tokens < 192


def test_damage_is_computed_again_in_silence(folder, requests, alone, tmp_path, caplog):
    with served(config(folder, tmp_path)) as first:
        first.ask(requests[0])
        first.settle()
    (segment,) = tmp_path.glob("*.blocks")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.write_bytes(damaged)
    with served(config(folder, tmp_path)) as second:
        assert second.ask(requests[0]) == {"0": alone["0"]}
        assert second.settle().num_digest_failures == 1
        assert second.ask(requests[0]) == {"0": alone["0"]}
    assert "has a wrong digest, and is computed again" in caplog.text


def test_planted_a_digest_that_is_not_checked_changes_what_is_said(folder, requests, alone, tmp_path, monkeypatch):
    with served(config(folder, tmp_path)) as first:
        first.ask(requests[0])
        first.settle()
    for segment in tmp_path.glob("*.blocks"):
        segment.write_bytes(bytes(one ^ 1 for one in segment.read_bytes()))
    monkeypatch.setattr(sealing.Sealer, "unseal", lambda self, name, record: record[:-16])
    with served(config(folder, tmp_path)) as second:
        assert second.ask(requests[0]) != {"0": alone["0"]}


def kept_below(folder: Path) -> tuple[int, int, int, int]:
    """Pinned blocks in the store of a folder, their kinds and tenants, and seconds until the first pin ends."""
    query = "SELECT count(*), count(DISTINCT kind), count(DISTINCT tenant), min(until) - unixepoch() FROM kept JOIN "
    with sqlite3.connect(folder / "index.sqlite") as index:
        (found,) = index.execute(query + "blocks USING (kind, name)").fetchall()
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_pinned_is_kept_on_the_disk_of_each_rank_beyond_the_replica(num_ranks, folder, requests, tmp_path):
    replica = Replica.start(config(folder, tmp_path, num_ranks))
    try:
        first = Served(replica)
        first.ask(replace(requests[0], cache_ttl_s=300, tenant="gold"))
        first.settle()
        while kept_below(tmp_path)[0] < 12 * num_ranks:  # each rank writes its own; the test's time-out bounds it
            time.sleep(0.01)
    finally:
        replica.stop()
    found = kept_below(tmp_path)
    assert found[:3] == (12 * num_ranks, num_ranks, 1)
    assert 200 < found[3] <= 301
    replica = Replica.start(config(folder, tmp_path, num_ranks))
    try:
        (pin,) = kept(replica)
        assert (pin.tenant, pin.num_blocks) == ("gold", 12)
        assert 200 < pin.ttl_s <= 300
        assert replica.engine.between_steps(lambda: replica.engine.tier.unpin("gold", pin.last_hash)).result() == 0
        deadline_s = time.monotonic() + LIMIT_S
        while kept(replica):
            assert time.monotonic() < deadline_s, "it lies on the disk alone, and is unpinned there"
    finally:
        replica.stop()


def kept(replica: Replica) -> list[StoredPin]:
    """Pins that the disk has."""
    return replica.movers.own.mover.kept_prefixes().result(LIMIT_S)
