"""Blocks that go between replicas of another block size or number of ranks change no bit, or stay where they are."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.model_runner import ModelRunner, follow
from holdfast.worker.executors import block_layout
from holdfast.worker.executors.block_layout import BlockLayout, Bytes, Heads
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import BlockSource, EngineRequest
from tests.fake_group import FakeGroup, run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.hybrids import request, save_hybrid
from tests.parity.test_offload import NUM_NEW, Served, config
from tests.parity.test_transfers import EVERYWHERE, on_links
from tests.parity.test_transfers import _always_worth_it as _always_worth_it

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 40, "hidden_size": 128}
UNEQUAL = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 40, "hidden_size": 144}
FEW = {**HEADS, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), **HEADS, max_position_embeddings=512)


@pytest.fixture(scope="module")
def asked(prompts) -> list[EngineRequest]:
    long = (prompts[0] * 4)[:200]
    return [request("long", long, NUM_NEW), request("branch", [*prompts[2], *long[:150]], NUM_NEW)]


def worker(folder: Path, block_size: int = 16, num_ranks: int = 1, **cache) -> WorkerConfig:
    """Its known answer is asked for once."""
    one = config(folder, None, num_ranks, block_size=block_size, **cache)
    return one.model_copy(update={"health": one.health.model_copy(update={"self_check_every_s": 1e6})})


def with_replica(one: WorkerConfig, work: Callable[[Served], None]) -> None:
    """Its ranks are threads."""

    def run(group: FakeGroup) -> None:
        group.close = lambda: None  # another rank may not have left the last meeting yet
        with torch.inference_mode(False), torch.no_grad():  # an engine's thread writes to its tensors
            runner = ModelRunner.load(one, group)
            if group.rank > 0:
                follow(runner, group)
                return
            replica = Replica.around(one, runner, group)
            try:
                work(Served(replica))
            finally:
                replica.stop()

    run_ranks(one.parallel.tensor_parallel_size, run, timeout_s=600)


def with_both(one: WorkerConfig, other: WorkerConfig, work: Callable[[Served, Served], None]) -> None:
    with_replica(one, lambda first: with_replica(other, lambda second: work(first, second)))


def told(first: Served, second: Served, requests: list[EngineRequest], block_size: int) -> dict[str, list[int]]:
    """What the second one says with the blocks of the first one, which has computed all of them."""
    said: dict[str, list[int]] = {}

    def ask(address: str) -> None:
        for one in requests:
            source = BlockSource(address, EVERYWHERE, block_size=block_size)
            said.update(second.ask(replace(one, block_source=source)))

    on_links(first, second, ask)
    return said


def check(one: WorkerConfig, other: WorkerConfig, requests: list[EngineRequest], least: int = 128) -> None:
    """Each says what both say alone with what it takes from the other: `least` of 200 tokens, and no wrong digest."""

    def compare(first: Served, second: Served) -> None:
        expected = first.ask(*requests)
        assert second.ask(*requests) == expected
        forget(second)
        assert told(first, second, requests, first.replica.info.block_size) == expected
        received = second.stats()
        assert received.num_received_tokens >= least
        assert received.num_prefix_hit_tokens >= received.num_received_tokens
        assert (received.num_digest_failures, received.num_disk_errors) == (0, 0)

    with_both(one, other, compare)


def forget(served: Served) -> None:
    served.replica.engine.between_steps(served.replica.engine.forget_cache).result()


@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(16, 32), (32, 16), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((48, 64), (64, 48)))],
)
def test_blocks_of_another_size_are_split_and_joined(theirs, ours, cache, folder, asked):
    check(worker(folder, theirs, **cache), worker(folder, ours, **cache), asked)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_heads_come_from_the_ranks_that_have_them(theirs, ours, folder, asked):
    check(worker(folder, 16, theirs), worker(folder, 32, ours), asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "theirs", "ours"), [(UNEQUAL, 1, 2), (UNEQUAL, 3, 2), (FEW, 4, 1), (FEW, 1, 4), (FEW, 4, 2)]
)
def test_ranks_with_unequal_and_with_repeated_heads(heads, theirs, ours, asked, tmp_path):
    folder = save_tiny_model("llama", tmp_path, **heads, max_position_embeddings=512)
    check(worker(folder, 16, theirs), worker(folder, 16, ours), asked)


def test_latents_come_to_more_ranks(asked, tmp_path):
    """Every rank has all of them."""
    folder = save_tiny_model("deepseek_v3", tmp_path, max_position_embeddings=512)
    check(worker(folder, 32, 1), worker(folder, 16, 2), asked)


def test_states_stay_where_ranks_or_blocks_differ_and_the_log_says_so(asked, tmp_path, caplog):
    folder = save_hybrid(tmp_path, "conv, attention, conv", max_position_embeddings=512)

    def refused(first: Served, second: Served) -> None:
        expected = first.ask(*asked)
        assert told(first, second, asked, 16) == expected
        assert second.stats().num_received_tokens == 0

    with caplog.at_level(logging.INFO):
        with_both(worker(folder, 16, 1), worker(folder, 16, 2), refused)
    assert "states go between replicas of equal ranks and block sizes alone" in caplog.text


def test_other_numbers_and_other_sizes_than_were_said_are_refused_with_the_reason(folder, asked, caplog):
    def refused(first: Served, second: Served) -> None:
        expected = second.ask(*asked)
        forget(second)
        first.ask(*asked)
        assert told(first, second, asked, 32) == expected
        assert second.stats().num_received_tokens == 0

    with caplog.at_level(logging.INFO):
        with_both(worker(folder, 16), worker(folder, 32, kv_cache_dtype="int8"), refused)
        with_both(worker(folder, 16), worker(folder, 64), refused)
    assert "it keeps keys and values as float32" in caplog.text
    assert "its blocks have 16 tokens, and were asked for as blocks of 32" in caplog.text


def test_a_replica_without_a_known_answer_gives_nothing_to_other_ranks(folder, asked, caplog):
    def refused(first: Served, second: Served) -> None:
        expected = first.ask(*asked)
        assert told(first, second, asked, 16) == expected
        assert second.stats().num_received_tokens == 0

    with caplog.at_level(logging.INFO):
        with_both(config(folder, None, 1), config(folder, None, 2), refused)
    assert "what it has measured of its arithmetic is another" in caplog.text


def plain_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of values are taken for units."""
    monkeypatch.setattr(block_layout, "_turned", lambda values, shape, size: values.reshape(*values.shape[:2], -1))


def heads_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All receivers get the first heads of a row."""
    cut = BlockLayout.cut

    def first(self: BlockLayout, row: Bytes, heads: Heads) -> Bytes:
        return cut(self, row, tuple(own[: len(some)] for own, some in zip(self.heads, heads, strict=True)))

    monkeypatch.setattr(BlockLayout, "cut", first)


@pytest.mark.parametrize(
    ("fault", "ranks", "sizes"), [(plain_halves, 1, (16, 32)), (heads_of_the_first_rank, 2, (16, 16))]
)
def test_planted_mistakes_change_what_is_said(fault, ranks, sizes, folder, asked, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(worker(folder, sizes[0]), worker(folder, sizes[1], ranks), asked)
