"""Blocks that go from one replica to another change no bit: at 1 and 2 ranks, with states, damaged, cut off."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from holdfast.v1 import engine_pb2_grpc
from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine import block_sockets, frame_receiver, sendings, tier_mover, transfer_key
from holdfast.worker.engine.block_frames import FrameSender
from holdfast.worker.engine.block_sockets import BlockServer
from holdfast.worker.engine.frame_receiver import FrameReceiver
from holdfast.worker.engine.sendings import Sendings
from holdfast.worker.engine.staging import StagedFrame
from holdfast.worker.errors import HoldfastError
from holdfast.worker.replica import block_exchange
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import BlockSource, EngineRequest
from holdfast.worker.scheduler.step_time import StepTimeModel
from holdfast.worker.step_update import FetchedAhead, StepUpdate
from holdfast.worker.wire.link_requests import take_pins_message
from holdfast.worker.wire.link_security import LINK_NAME, UNSECURED, LinkSecurity
from tests import fake_nixl, loops
from tests.certificates import Authority
from tests.parity.families import save_tiny_model
from tests.parity.hybrids import request, save_hybrid
from tests.parity.test_offload import NUM_NEW, Served, config

LIMIT_S = 60.0
EVERYWHERE = 10**6


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch):
    """Computing a prompt takes a minute, so that whatever another replica has is asked for."""
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda *_: LIMIT_S)


@pytest.fixture(autouse=True)
def _however_slow(monkeypatch):
    """No transfer ends because the machine is busy."""
    monkeypatch.setattr(block_exchange, "ASK_S", LIMIT_S)
    monkeypatch.setattr(sendings, "STALL_S", LIMIT_S)
    for limit in ("HANDSHAKE_S", "STALL_S"):
        monkeypatch.setattr(transfer_key, limit, LIMIT_S)


@contextmanager
def two_replicas(worker: WorkerConfig, other: WorkerConfig | None = None) -> Iterator[tuple[Served, Served]]:
    with ExitStack() as stack:
        both = []
        for one in (worker, other or worker):
            replica = Replica.start(one)
            stack.callback(replica.stop)
            both.append(Served(replica))
        yield both[0], both[1]


def on_links(
    first: Served,
    second: Served,
    ask: Callable[[str], None],
    security: LinkSecurity = UNSECURED,
    other: LinkSecurity | None = None,
) -> None:
    """Calls `ask` on a thread, with the address of the first one's link, while both are linked. `other` is the security
    of the second one, if it is another.
    """

    async def linked() -> None:
        servers = [
            await LinkServer.start(first.replica, replica_id="first", security=security),
            await LinkServer.start(second.replica, replica_id="second", security=other or security),
        ]
        try:
            await asyncio.to_thread(ask, servers[0].address)
        finally:
            for server in servers:
                await server.stop()

    loops.run(linked(), timeout_s=3 * LIMIT_S)


def from_there(one: EngineRequest, address: str) -> EngineRequest:
    return replace(one, block_source=BlockSource(address, EVERYWHERE))


def told_the_same(first: Served, second: Served, requests: list[EngineRequest], **options) -> None:
    """The second one is told for each request what the first one is told."""
    expected = first.ask(*requests)

    def ask(address: str) -> None:
        for one in requests:
            assert second.ask(from_there(one, address)) == {one.request_id: expected[one.request_id]}

    on_links(first, second, ask, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def requests(prompts) -> list[EngineRequest]:
    long = (prompts[0] * 4)[:200]
    return [request("long", long, NUM_NEW), request("branch", [*prompts[2], *long[:150]], NUM_NEW)]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prefix_that_another_replica_has_is_not_computed_again(num_ranks, folder, requests):
    with two_replicas(config(folder, None, num_ranks)) as (first, second):
        told_the_same(first, second, requests)
        stats = second.stats()
        assert stats.num_received_tokens >= 190
        assert stats.received_bytes > 0
        assert first.stats().num_sent_blocks >= 12


@pytest.mark.parametrize("way", ["tcp", "nixl"])
def test_every_way_brings_the_same(way, folder, requests, monkeypatch):
    """Shared memory is that of all other tests."""
    fake_nixl.install(monkeypatch)
    with two_replicas(config(folder, None, kv_transfer_way=way)) as (first, second):
        told_the_same(first, second, requests)
        assert second.stats().num_received_tokens >= 190
    assert any(agent.num_reads for agent in fake_nixl.AGENTS.values()) is (way == "nixl")


def test_blocks_come_while_they_are_computed(folder, requests, monkeypatch):
    """The second one is told of a prompt before the first one gets it, in chunks."""
    asked = threading.Event()
    begin = Sendings.begin

    def noted_begin(self: Sendings, *args, **options) -> int:
        number = begin(self, *args, **options)
        asked.set()
        return number

    monkeypatch.setattr(Sendings, "begin", noted_begin)
    monkeypatch.setattr(tier_mover, "PIECE_BYTES", 1 << 14)
    worker = config(folder, None)
    chunked = worker.model_copy(
        update={"scheduler": worker.scheduler.model_copy(update={"max_num_batched_tokens": 32})}
    )
    one = requests[0]
    with two_replicas(chunked) as (first, second):

        def ask(address: str) -> None:
            second.replica.engine.fetch_ahead(replace(one, block_source=BlockSource(address, EVERYWHERE, True)))
            assert asked.wait(LIMIT_S)
            expected = first.ask(one)
            assert second.ask(from_there(one, address)) == expected

        on_links(first, second, ask)
        stats = second.stats()
        assert (stats.num_received_tokens, stats.num_prefix_hit_tokens) == (192, 192)
        assert stats.received_bytes_per_s == {"": 1e9}, "the speed is that of computing"


class Told:
    """A listener that waits for blocks."""

    def __init__(self) -> None:
        self.fetched: list[FetchedAhead] = []
        self.changed = threading.Event()

    def on_update(self, update: StepUpdate) -> None:
        self.fetched += update.fetched_ahead
        if self.fetched:
            self.changed.set()

    def on_failure(self, error: HoldfastError) -> None:
        self.changed.set()


def test_blocks_of_a_running_request_go_ahead_of_it(folder, requests):
    """It has three tokens of output then, and four once it moves: nothing is asked for again."""
    told = Told()
    with two_replicas(config(folder, None)) as (first, second):
        second.replica.engine.attach(told)

        def move(address: str) -> None:
            expected = first.ask(requests[0])
            output = expected[requests[0].request_id]
            ahead = BlockSource(address, EVERYWHERE, is_computing=True, is_leaving=True)
            later = replace(requests[0], output_token_ids=tuple(output[:3]), block_source=ahead)
            second.replica.engine.fetch_ahead(later, told, "attempt")
            assert told.changed.wait(LIMIT_S)
            assert told.fetched == [FetchedAhead("attempt", 192)]
            before = first.stats().num_sent_blocks
            assert second.ask(replace(requests[0], output_token_ids=tuple(output[:4]))) == expected
            assert first.stats().num_sent_blocks == before == 12

        on_links(first, second, move)
        assert second.stats().num_prefix_hit_tokens == second.stats().num_received_tokens == 192


def test_over_tls_blocks_are_encrypted_by_a_key_that_the_links_agree_on(folder, requests, tmp_path, monkeypatch):
    """Bytes of no block are seen on the connection; whose certificate another authority has signed gets nothing."""
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    links = [
        LinkSecurity(token="one", tls=one.tls(one.pair(f"{name}-link", LINK_NAME)))
        for name, one in (("ours", ours), ("forged", others))
    ]
    rows: list[bytes] = []
    frames: list[bytes] = []
    send, come = BlockServer.send, FrameReceiver._come

    def noted_send(self: BlockServer, transfer: bytes, blocks: StagedFrame) -> None:
        rows.extend(row.tobytes() for row in blocks.rows)
        send(self, transfer, blocks)

    def noted_come(self: FrameReceiver, memory: memoryview) -> Iterator[int]:
        before = 0
        for num_there in come(self, memory):
            frames.append(bytes(memory[before:num_there]))  # before it is decrypted in its place
            yield (before := num_there)

    monkeypatch.setattr(BlockServer, "send", noted_send)
    monkeypatch.setattr(FrameReceiver, "_come", noted_come)
    with two_replicas(config(folder, None, kv_transfer_way="tcp")) as (first, second):
        told_the_same(first, second, requests[:1], security=links[0])
        assert second.stats().num_received_tokens >= 190
        wire = b"".join(frames)
        assert len(wire) > sum(map(len, rows)) > 0
        assert not any(row[:64] in wire for row in rows)
        second.replica.engine.between_steps(second.replica.engine.forget_cache).result()
        before = second.stats().num_received_tokens
        told_the_same(first, second, requests[:1], security=links[0], other=links[1])
        assert second.stats().num_received_tokens == before


@pytest.mark.parametrize("pattern", ["conv, attention, conv", "delta nets alone"])
def test_states_come_with_their_prefix(pattern, tmp_path, prompts):
    folder = save_hybrid(tmp_path / "hybrid", pattern, max_position_embeddings=512)
    long = (prompts[0] * 4)[:200]
    with two_replicas(config(folder, None)) as (first, second):
        told_the_same(first, second, [request("long", long, NUM_NEW)])
        told_the_same(first, second, [request("further", [*long, *prompts[1]], NUM_NEW)])
        assert second.stats().num_received_tokens >= 150


@pytest.mark.parametrize("has_disk", [False, True])
def test_models_with_windows_are_told_the_same_by_what_another_replica_has(has_disk, tmp_path, prompts):
    """Blocks of a window's own stay where they are, and the prompt is computed. With a disk all blocks are of one kind,
    and go.
    """
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    sizes = {"max_position_embeddings": 512, "sliding_window": 40, "num_hidden_layers": 4}
    folder = save_tiny_model("gemma3_text", tmp_path / "model", layer_types=kinds, **sizes)
    workers = [config(folder, tmp_path / name if has_disk else None) for name in ("one", "other")]
    asked = [
        request("long", (prompts[0] * 4)[:200], 50),
        request("further", [*(prompts[0] * 4)[:150], *prompts[1]], 50),
    ]
    with two_replicas(*workers) as (first, second):
        told_the_same(first, second, asked)
        assert (second.stats().num_received_tokens >= 150) == has_disk


def damage(monkeypatch) -> None:
    fill = StagedFrame.fill

    def damaged(self: StagedFrame, *args, **options) -> None:
        fill(self, *args, **options)
        for row in self.rows:
            row[:] = 0

    monkeypatch.setattr(StagedFrame, "fill", damaged)


def cut(monkeypatch) -> None:
    def no_frame(*_: object) -> None:
        raise ConnectionResetError("cut")

    monkeypatch.setattr(FrameSender, "send_now", lambda *_: False)
    monkeypatch.setattr(FrameSender, "send_staged", no_frame)


def deafen(monkeypatch) -> None:
    monkeypatch.setattr(block_sockets.BlockServer, "_taken", lambda self, transfer: None)


@pytest.mark.parametrize(("fault", "num_damaged"), [(damage, 1), (cut, 0), (deafen, 0)])
def test_what_does_not_come_whole_is_computed(fault, num_damaged, folder, requests, monkeypatch):
    fault(monkeypatch)
    with two_replicas(config(folder, None)) as (first, second):
        told_the_same(first, second, requests[:1])
        stats = second.stats()
        assert (stats.num_received_tokens, stats.num_digest_failures) == (0, num_damaged)
        assert stats.num_prefix_hit_tokens == 0


def test_a_planted_digest_that_nobody_checks_changes_the_answer(folder, requests, monkeypatch):
    damage(monkeypatch)
    check = frame_receiver.copy_checked
    monkeypatch.setattr(frame_receiver, "copy_checked", lambda *args: check(*args) or True)
    with two_replicas(config(folder, None)) as (first, second), pytest.raises(AssertionError):
        told_the_same(first, second, requests[:1])


def test_blocks_of_another_kind_and_of_another_cluster_are_refused(folder, requests, tmp_path):
    worker = config(folder, None)
    other = worker.model_copy(update={"cache": worker.cache.model_copy(update={"kv_cache_dtype": "int8"})})
    said: dict[str, list[int]] = {}
    with two_replicas(worker, other) as (first, second):
        expected = second.ask(requests[0])
        second.replica.engine.between_steps(second.replica.engine.forget_cache).result()
        first.ask(requests[0])
        on_links(first, second, lambda address: said.update(second.ask(from_there(requests[0], address))))
        assert said == expected
        assert second.stats().num_received_tokens == 0
    with two_replicas(worker) as (first, second):
        told_the_same(
            first, second, requests[:1], security=LinkSecurity(token="one"), other=LinkSecurity(token="other")
        )
        assert second.stats().num_received_tokens == 0


def test_a_replica_that_leaves_hands_its_pins_on(folder, requests):
    """Asked for by the address alone; then the prefix is pinned there, and the request is told the same."""
    kept = replace(requests[0], cache_ttl_s=3600, tenant="gold")
    with two_replicas(config(folder, None)) as (first, second):
        expected = first.ask(kept)

        async def hand_on() -> None:
            servers = [
                await LinkServer.start(one.replica, replica_id=name) for one, name in ((first, "a"), (second, "b"))
            ]
            async with grpc.aio.insecure_channel(servers[1].address) as channel:
                link = engine_pb2_grpc.EngineStub(channel).Link()
                await link.write(take_pins_message(servers[0].address))
                await link.write(take_pins_message(servers[0].address))  # as another router would
                await asyncio.wait_for(servers[0].hand_pins_on(LIMIT_S), LIMIT_S)
                link.cancel()
            for server in servers:
                await server.stop()

        loops.run(hand_on(), timeout_s=2 * LIMIT_S)
        assert second.stats().num_pinned_blocks == first.stats().num_pinned_blocks == 12
        assert second.ask(replace(kept, cache_ttl_s=0)) == expected
        assert second.stats().num_prefix_hit_tokens == second.stats().num_received_tokens == 192


def test_a_replica_without_pins_leaves_at_once(folder):
    async def leave(replica: Replica) -> None:
        server = await LinkServer.start(replica, replica_id="a")
        await asyncio.wait_for(server.hand_pins_on(LIMIT_S), 1.0)
        await server.stop()

    with two_replicas(config(folder, None)) as (first, _):
        loops.run(leave(first.replica), timeout_s=LIMIT_S)
